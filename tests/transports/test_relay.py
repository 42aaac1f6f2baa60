"""Weights that nodes pass on: each node has each version whole, few of them leave the learner's
process, and nobody waits for a node that stands still.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.transports.queues import SPEC
from unirl.core.queue import QueueConfig
from unirl.core.weights import Weights
from unirl.transports.remote.hub import WEIGHTS
from unirl.transports.remote.layout import NodeMemory
from unirl.transports.remote.link import NodeLink
from unirl.transports.remote.relay import WeightTree
from unirl.transports.remote.token import Token
from unirl.transports.remote.transport import RemoteTransport
from unirl.transports.remote.weights import node_store
from unirl.transports.remote.wire import Frame, Kind, read_frame, read_with_text

NAMES = ("first", "second", "last")


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Enough to be passed on, in several pieces."""
    return {name: torch.full((800_000,), float(version)) for name in NAMES}


class Loaded:
    def load_weights(self, weights: Weights) -> None:
        self.values = {float(each) for name in NAMES for each in weights[name].unique()}


class Learner:
    """A learner's process whose nodes are threads of this one, as if they were far away."""

    def __init__(self, fanout: int) -> None:
        self.transport = RemoteTransport(silent_seconds=60.0, weights_fanout=fanout)
        self.transport.hub._listeners[1].close()  # nothing listens near
        self.queue = self.transport.queue(SPEC, QueueConfig())
        self.store = self.transport.weights(weights_of(0))
        self.nodes: dict[int, tuple[NodeLink, Any]] = {}
        self._last = 0

    @property
    def num_sent(self) -> float:
        """Versions that left this process."""
        return self.store.outgoing.num_sent / self.store.num_bytes

    def add(self) -> int:
        hub, store = self.transport.hub, node_store(self.store.shapes)
        self._last += 1
        memory = {0: NodeMemory(SPEC, QueueConfig())}
        link = NodeLink(hub.address, hub.token.data, self._last, memory, {0: store})
        self.nodes[self._last] = (link, store)
        return self._last

    def end(self, number: int) -> None:
        self.nodes.pop(number)[0].close()

    def publish(self, version: int) -> None:
        self.store.publish(weights_of(version), version)

    def all_have(self, version: int, seconds: float = 5.0) -> None:
        deadline, into = time.monotonic() + seconds, Loaded()
        for _, store in self.nodes.values():
            while store.version < version:
                assert time.monotonic() < deadline, f"{store.version} of {version}"
                time.sleep(1e-3)
            assert store.pull(into, -1) == version and into.values == {float(version)}

    def close(self) -> None:
        for link, _ in self.nodes.values():
            link.close()
        self.transport.close()


@pytest.fixture
def make_learner() -> Iterator[Callable[[int], Learner]]:
    made: list[Learner] = []

    def make(fanout: int) -> Learner:
        made.append(Learner(fanout))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(("fanout", "direct"), [(0, 5), (1, 1), (2, 2)])
def test_few_nodes_get_weights_from_the_learners_process_and_the_others_from_them(
    make_learner: Callable[[int], Learner], fanout: int, direct: int
) -> None:
    learner = make_learner(fanout)
    learner.publish(0)
    for _ in range(5):
        learner.add()
    learner.all_have(0)
    for version in range(1, 3):
        learner.publish(version)
        learner.all_have(version)
    time.sleep(0.05)  # the last bytes have left, and are counted next
    assert learner.num_sent == 3 * direct


def test_nodes_come_and_go_and_all_have_every_version(
    make_learner: Callable[[int], Learner],
) -> None:
    learner, rng = make_learner(2), random.Random(1)
    for _ in range(4):
        learner.add()
    for version in range(6):
        if version % 2:
            learner.end(rng.choice([*learner.nodes]))
            learner.add()
        learner.publish(version)
        learner.all_have(version)


class Breaks(dict[str, torch.Tensor]):
    """The last of them cannot be made."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "last":
            raise RuntimeError("a rank was lost")
        return super().__getitem__(name)


def test_a_version_that_was_broken_off_is_followed_by_a_whole_one_along_the_chain(
    make_learner: Callable[[int], Learner],
) -> None:
    learner = make_learner(1)
    for _ in range(3):
        learner.add()
    for version in range(1, 7, 2):
        with pytest.raises(RuntimeError, match="a rank was lost"):
            learner.store.publish(Breaks(weights_of(version)), version)
        learner.publish(version + 1)
        learner.all_have(version + 1)


def ends(sock: socket.socket) -> None:
    sock.close()


def stands_still(sock: socket.socket) -> None:
    threading.Event().wait(10.0)


def stands_still_in_a_version(sock: socket.socket) -> None:
    size = sum(4 * each.numel() for each in weights_of(0).values())
    with contextlib.suppress(OSError):
        sock.sendall(Frame(Kind.WEIGHTS, 0, 0, (5, size, 0, size)).pack() + bytes(1000))
        threading.Event().wait(10.0)


def sends_another_size(sock: socket.socket) -> None:
    sock.sendall(Frame(Kind.WEIGHTS, 0, 0, (5, 64, 0, 64)).pack() + bytes(64))


def sends_the_end_first(sock: socket.socket) -> None:
    size = sum(4 * each.numel() for each in weights_of(0).values())
    sock.sendall(Frame(Kind.WEIGHTS, 0, 0, (5, size, size - 8, 8)).pack() + bytes(8))


def sends_it_on(sock: socket.socket) -> None:
    sock.sendall(Frame(Kind.RELAY, 0, 0, (2,)).pack() + b"{}")


def sends_noise(sock: socket.socket) -> None:
    sock.sendall(b"\0" * 72)


@pytest.mark.parametrize(
    "behave",
    [None, ends, stands_still, stands_still_in_a_version, sends_another_size, sends_the_end_first,
     sends_it_on, sends_noise],
)  # fmt: skip
def test_who_is_left_without_weights_gets_them_from_the_learners_process(
    make_learner: Callable[[int], Learner],
    monkeypatch: pytest.MonkeyPatch,
    behave: Callable[[socket.socket], None] | None,
) -> None:
    """The node before it does all that it can do wrong; None: nothing listens there."""
    monkeypatch.setattr("unirl.transports.remote.weights.SILENT_SECONDS", 0.3)
    monkeypatch.setattr("unirl.transports.remote.link.SILENT_SECONDS", 0.3)
    learner = make_learner(1)
    hub = learner.transport.hub
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(hub.address)
        port = listener.getsockname()[1]
        raw.sendall(Frame(Kind.HELLO, 0, 0, (*hub.token.words, 99, WEIGHTS, port)).pack())
        assert read_frame(raw).kind is Kind.WELCOME

        def serve() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                assert hub.token.fits(read_frame(sock).values[:4])
                sock.sendall(Frame(Kind.WELCOME).pack())
                assert behave is not None
                behave(sock)

        if behave is None:
            listener.close()
        else:
            threading.Thread(target=serve, daemon=True).start()
        learner.add()
        learner.add()  # behind the one that is left without
        learner.publish(1)
        learner.all_have(1)
        learner.publish(2)
        learner.all_have(2)
    raw.close()


def test_a_node_that_takes_nothing_holds_up_nobody(make_learner: Callable[[int], Learner]) -> None:
    learner = make_learner(1)
    first, hub = learner.add(), learner.transport.hub
    raw = socket.create_connection(hub.address)
    raw.sendall(Frame(Kind.HELLO, 0, 0, (*hub.token.words, 99, WEIGHTS, 1)).pack())
    assert read_frame(raw).kind is Kind.WELCOME
    frame, (host, port) = read_with_text(raw)
    assert frame.kind is Kind.RELAY and host == "127.0.0.1"
    slow = socket.create_connection((host, port))
    slow.sendall(Frame(Kind.HELLO, 0, 0, (*hub.token.words, 99, WEIGHTS)).pack())
    assert read_frame(slow).kind is Kind.WELCOME
    for version in range(1, 6):
        learner.publish(version)
        learner.all_have(version)
    assert [*learner.nodes] == [first]
    slow.close()
    raw.close()


def test_who_does_not_know_the_token_gets_no_weights_from_a_node(
    make_learner: Callable[[int], Learner],
) -> None:
    learner = make_learner(1)
    number, hub = learner.add(), learner.transport.hub
    learner.publish(0)
    port = learner.nodes[number][0]._relay.number
    for said in (
        Frame(Kind.HELLO, 0, 0, (*Token().words, 5, WEIGHTS)),
        Frame(Kind.HELLO, 7, 0, (*hub.token.words, 5, WEIGHTS)),
        Frame(Kind.WELCOME),
    ):
        with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
            sock.sendall(said.pack())
            assert sock.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
        assert sock.recv(1) == b""  # a second after it said nothing
    learner.add()  # and others are let in meanwhile
    learner.all_have(0)


def test_the_earliest_node_with_room_takes_the_next_one_unless_somebody_was_left_without() -> None:
    tree = WeightTree(2)
    places = {number: ("10.0.0.1", number) for number in range(1, 12)}
    parents = [tree.join(number, places[number]) for number in range(1, 8)]
    assert parents == [None, None, *(places[each] for each in (1, 1, 2, 2, 3))]
    tree.leave_parent(3)
    assert [tree.join(8, places[8]), tree.join(9, places[9])] == [places[3], places[4]]
    tree.leave(4)
    tree.leave(5)
    assert tree.join(10, places[10]) == places[2]  # it has lost one; 1 takes no more
    for number in (1, 2, 3):
        tree.leave(number)
    assert tree.join(11, places[11]) is None
