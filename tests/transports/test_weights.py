"""Weight stores: the newest version, whole, copied once. Checked on both stores."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unirl.core.weights import Loadable, Weights, WeightStore
from unirl.transports.local import LentWeightStore, LocalWeightStore
from unirl.transports.remote.outgoing import send_versions
from unirl.transports.remote.weights import NodeWeights, RemoteWeights, node_store
from unirl.transports.shared_weights import SharedWeightStore

MakeStore = Callable[[Weights], WeightStore]


def receive(sock: socket.socket, store: SharedWeightStore, arrived: threading.Event) -> None:
    with contextlib.suppress(ConnectionError):
        NodeWeights(store, arrived.set).receive(sock)


class SentStore:
    """Both ends of the weights' way to a node on the learner's machine, and a socket between."""

    lends = False

    def __init__(self, example: Weights) -> None:
        self._here = RemoteWeights(example)
        self._there = node_store(self._here.shapes)
        self._arrived = threading.Event()
        ours, theirs = self.connect()
        threads = [
            threading.Thread(target=send_versions, args=(ours, 0, self._here.outgoing)),
            threading.Thread(target=receive, args=(theirs, self._there, self._arrived)),
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        weakref.finalize(self, end, self._here, threads)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair()

    @property
    def version(self) -> int:
        return self._there.version

    def publish(self, weights: Weights, version: int) -> None:
        self._here.publish(weights, version)
        while self.version != version:
            assert self._arrived.wait(5.0)
            self._arrived.clear()

    def pull(self, into: Loadable, have: int) -> int:
        return self._there.pull(into, have)


class FarStore(SentStore):
    """The same by TCP, as to other machines."""

    def connect(self) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            return ours, listener.accept()[0]


def end(store: RemoteWeights, threads: list[threading.Thread]) -> None:
    store.close()
    for thread in threads:
        thread.join(5.0)


@pytest.fixture(params=[LocalWeightStore, SharedWeightStore, SentStore, FarStore])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    if request.param is LocalWeightStore:
        return lambda example: LocalWeightStore()
    return request.param  # type: ignore[no-any-return]


class Loaded:
    """Remembers what it was given, by copy."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.num_loads = 0

    def load_weights(self, weights: Weights) -> None:
        self.weights = {name: value.clone() for name, value in weights.items()}
        self.num_loads += 1


def example(value: float) -> dict[str, torch.Tensor]:
    return {
        "bf16": torch.full((3, 5), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "none": torch.zeros(0),
        "images": torch.full((2, 3, 4, 4), value).to(memory_format=torch.channels_last),
    }


def test_a_puller_gets_the_newest_version_in_every_dtype_and_shape(make_store: MakeStore) -> None:
    store, into = make_store(example(0)), Loaded()
    assert store.version == -1
    store.publish(example(1), 0)
    store.publish(example(2), 1)
    assert store.pull(into, -1) == store.version == 1
    for name, value in example(2).items():
        assert into.weights[name].dtype == value.dtype
        assert torch.equal(into.weights[name], value)


def test_pulling_what_one_has_copies_nothing(make_store: MakeStore) -> None:
    store, into = make_store(example(0)), Loaded()
    store.publish(example(1), 7)
    assert store.pull(into, -1) == 7
    assert store.pull(into, 7) == 7
    assert into.num_loads == 1


def test_what_the_learner_does_after_publishing_is_not_seen(make_store: MakeStore) -> None:
    weights = example(1)
    store, into = make_store(weights), Loaded()
    store.publish(weights, 0)
    weights["scalar"].fill_(99)
    store.pull(into, -1)
    assert into.weights["scalar"] == 1


def test_a_reader_beside_a_busy_writer_never_sees_half_of_a_version(make_store: MakeStore) -> None:
    def whole(version: int) -> dict[str, torch.Tensor]:
        return {"a": torch.full((20_000,), version), "b": torch.full((5,), version)}

    store = make_store(whole(0))
    store.publish(whole(0), 0)
    done = threading.Event()

    def write() -> None:
        version = 1
        while not done.is_set():
            store.publish(whole(version), version)
            version += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        into, have, seen = Loaded(), -1, 0
        for _ in range(3000):
            newest = store.pull(into, have)
            assert newest >= have
            seen += newest != have
            have = newest
            assert into.weights["a"].eq(have).all()
            assert into.weights["b"].eq(have).all()
    finally:
        done.set()
        writer.join()
    assert seen > 10  # the writer really was busy


class Overtaken(Loaded):
    """Other versions are published during its first copy, between one tensor and the next."""

    def __init__(self, store: WeightStore, *versions: int) -> None:
        super().__init__()
        self._store, self._versions = store, versions

    def load_weights(self, weights: Weights) -> None:
        begun = {"bf16": weights["bf16"].clone()}
        if self.num_loads == 0:
            for version in self._versions:
                self._store.publish(example(version), version)
        super().load_weights({**weights, **begun})


@pytest.mark.parametrize(
    ("versions", "found", "num_loads"),
    [((2,), 1, 1), ((2, 3), 3, 2)],
    ids=["one does not disturb it", "after two it reads again"],
)
def test_a_reader_that_is_overtaken_gets_one_whole_version(
    versions: tuple[int, ...], found: int, num_loads: int
) -> None:
    store = SharedWeightStore(example(0))
    store.publish(example(1), 1)
    into = Overtaken(store, *versions)
    assert (store.pull(into, -1), into.num_loads) == (found, num_loads)
    for name, value in example(found).items():
        assert torch.equal(into.weights[name], value)
    assert store.pull(into, found) == versions[-1] == into.weights["scalar"]


class Interrupted:
    """A table of cells; after so many reads another process is at work."""

    def __init__(self, cells: Any, num_reads: int, other: Callable[[], None]) -> None:
        self._cells, self._left, self._other = cells, num_reads, other

    def __getitem__(self, index: int) -> int:
        value: int = self._cells[index]
        self._left -= 1
        if self._left == 0:
            self._other()
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._cells[index] = value


@pytest.mark.parametrize("num_reads", range(1, 6))
def test_a_version_published_at_any_moment_of_a_pull_is_not_mistaken_for_the_one_read(
    num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, into, published = SharedWeightStore(example(0)), Loaded(), []
    store.publish(example(1), 1)

    def publish() -> None:
        store.publish(example(2), 2)
        published.append(2)

    monkeypatch.setattr(store, "cells", Interrupted(store.cells, num_reads, publish))
    newest = store.pull(into, -1)
    assert published == [2] and newest in (1, 2)
    assert into.weights["scalar"] == newest


def test_a_store_of_one_process_that_takes_turns_copies_nothing() -> None:
    """On a GPU every copy is a whole model."""
    store, weights = LentWeightStore(), example(1)
    assert store.version == -1 and store.lends

    class Keeps:
        def load_weights(self, given: Weights) -> None:
            assert given is weights

    store.publish(weights, 4)
    assert store.pull(Keeps(), 4) == store.pull(Keeps(), -1) == store.version == 4


class Breaks(dict[str, torch.Tensor]):
    """The last of them cannot be made."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "last":
            raise RuntimeError("a rank was lost")
        return super().__getitem__(name)


def large(value: float) -> dict[str, torch.Tensor]:
    """Several pieces, of which the first leaves before the last is there."""
    return {name: torch.full((1_500_000,), value) for name in ("first", "second", "last")}


def test_a_version_that_was_broken_off_on_its_way_is_followed_by_a_whole_one() -> None:
    store, into = FarStore(large(0)), Loaded()
    for version in range(1, 7, 2):
        with pytest.raises(RuntimeError, match="a rank was lost"):
            store.publish(Breaks(large(version)), version)
        store.publish(large(version + 1), version + 1)
        assert store.pull(into, -1) == version + 1
        assert all(value.eq(version + 1).all() for value in into.weights.values())


class MadeWhenAsked(dict[str, torch.Tensor]):
    """Counts how many of the tensors it made are there at a time, as merged adapters would be."""

    def __init__(self, sizes: Weights) -> None:
        super().__init__(sizes)
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        made = super().__getitem__(name) + 0
        self.alive = [one for one in self.alive if one() is not None] + [weakref.ref(made)]
        self.most = max(self.most, len(self.alive))
        return made


def test_weights_that_are_made_when_asked_for_are_not_all_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unirl.device.PIECE_BYTES", 4000)
    weights = MadeWhenAsked({f"{i}": torch.full((500,), float(i)) for i in range(20)})
    store, into = SharedWeightStore(weights), Loaded()
    store.publish(weights, 1)
    store.pull(into, -1)
    assert all(float(into.weights[f"{i}"][7]) == i for i in range(20))
    assert weights.most <= 3
