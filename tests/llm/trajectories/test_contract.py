"""One contract for SQLite, Postgres, and Postgres with bodies in a bucket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.llm.trajectories.services import emptied, free_port
from tests.llm.trajectories.stored_episodes import group, record, straight
from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.expiry import DAY, expire
from unirl.llm.trajectories.filter import Filter
from unirl.llm.trajectories.ledger import Ledger
from unirl.llm.trajectories.queries import QUERIES, answer
from unirl.llm.trajectories.record import NO_TICKET
from unirl.llm.trajectories.store import TrajectoryStore, open_store

KINDS = (
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.slow),
    pytest.param("bucket", marks=pytest.mark.slow),
)


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    if request.param == "sqlite":
        return StoreConfig()
    url = request.getfixturevalue("server")
    bodies = request.getfixturevalue("bucket") if request.param == "bucket" else ""
    emptied(url)
    return StoreConfig(url=url, bodies_url=bodies)


@pytest.fixture
def store(config: StoreConfig, tmp_path: Path) -> Iterator[TrajectoryStore]:
    with closing(open_store(config, tmp_path)) as store:
        yield store


def test_what_was_put_is_found_and_read(store: TrajectoryStore) -> None:
    given = record()
    ep = store.put(given)
    assert ep is not None and store.put(given) is None
    assert store.get(ep) == given
    before = store.bytes_read
    assert [store.turn(ep, i) for i in range(4)] == given.episode.turns
    assert store.bytes_read - before < store.bytes_written + 4 * 24
    assert [row["id"] for row in store.find(Filter(task="sums", ending="time", version=3))] == [ep]
    assert [row["tool"] for row in store.steps(ep)] == ["calculator", None, None, None]
    for name in QUERIES:
        answer(store, name)


def test_all_or_nothing_of_what_is_put_together(store: TrajectoryStore) -> None:
    with pytest.raises(Exception, match=r"."):
        store.put_many([*group(1), record(Episode([]), ticket=2, created=None)])
    assert store.count() == 0
    assert len(list(filter(None, store.put_many(group(1))))) == 2


def test_attempts_at_one_ticket_may_be_put_together(store: TrajectoryStore) -> None:
    first, second = group(1), [replace(each, episode=straight(900)) for each in group(1)]
    without = [record(straight(901), ticket=NO_TICKET, place=0)]
    found = store.put_many([*first, *without, *second, *second, *first[:1]])
    assert [ep is not None for ep in found] == [True] * 5 + [False] * 3
    kept = [row["id"] for row in store.find(Filter(state="done"))]
    assert sorted(kept) == found[2:5]  # the second attempt, and what has no ticket
    assert [record.episode for record in map(store.get, found[3:5])] == [straight(900)] * 2


def test_a_group_that_was_cut_is_not_whole(store: TrajectoryStore) -> None:
    *whole, last = group(1, size=3)
    store.put_many([*whole, replace(last, episode=Episode(ending="aborted"))])
    assert store.count(Filter(state="failed")) == 1 and Ledger(store).tickets() == []
    assert Ledger(store).mark_trained("test", [1], 4) == [1]
    assert store.count(Filter(state="trained")) == 2


def test_groups_are_leased_by_one_consumer_each(
    store: TrajectoryStore, config: StoreConfig, tmp_path: Path
) -> None:
    store.put_many([each for ticket in range(12) for each in group(ticket)])
    found: list[int] = []

    def consume(name: str) -> None:
        with closing(open_store(config, tmp_path)) as own:
            ledger = Ledger(own)
            for _ in range(40):
                taken = ledger.lease(2, name)
                found.extend(each.ticket for each in ledger.acknowledge(name, taken, 1))

    threads = [threading.Thread(target=consume, args=(f"c{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == list(range(12))
    ledger = Ledger(store)
    assert ledger.release_after("test", 0) == list(range(12))
    assert ledger.mark_trained("test", [0, 99], 1) == [0, 99]
    store.put_many(group(99))
    assert {row["state"] for row in store.find(Filter(ticket=99))} == {"trained"}
    assert [each.ticket for each in ledger.groups("test")] == [*range(12), 99]


def test_a_consumer_for_each_ticket_holds_one_group(store: TrajectoryStore) -> None:
    for ticket in range(3):
        store.put_many(group(ticket))
    ledger = Ledger(store)
    held = [ledger.hold(f"reader#{number}", run="test") for number in (0, 0, 1)]
    assert [each.ticket for each in held if each is not None] == [0, 0, 1]
    assert ledger.count_for("reader#", "test") == 3 and ledger.count_for("other#", "test") == 1
    assert ledger.acknowledge_held([("reader#0", 1), ("reader#1", 2), ("reader#7", 2)]) == 2
    assert ledger.acknowledge_held([("reader#0", 3)]) == 0
    assert ledger.hold_again("reader#", 1) == 1
    states = {row["ticket"]: (row["state"], row["trained_version"]) for row in store.find()}
    assert states == {0: ("trained", 1), 1: ("leased", None), 2: ("done", None)}
    again = ledger.hold("reader#1", run="test")
    assert again is not None and again.ticket == 1
    ledger.hold("other#0", run="test", seconds=-1.0)  # its lease has expired
    assert ledger.count_for("reader#", "test") == 3


def test_expired_bodies_are_gone(store: TrajectoryStore) -> None:
    now = 100 * DAY
    old = store.put(record(straight(1), ticket=1, created=now - 40 * DAY))
    new = store.put(record(straight(2), ticket=2, created=now))
    assert old is not None and new is not None
    assert expire(store, StoreConfig(), now=now) == {"age": 1}
    with pytest.raises(UniRLError, match="expired"):
        store.get(old)
    assert store.get(new).episode == straight(2)
    if store.bucket is not None:
        store.bucket.put(f"{store.name}/left-by-a-dead-process", b"x")
        keys = [key for chunk in store.bucket.older_than(store.name, 0.0) for key in chunk]
        assert len(keys) == 2


def test_many_senders_of_one_episode_store_it_once(
    config: StoreConfig, store: TrajectoryStore, tmp_path: Path
) -> None:
    def send() -> None:
        with closing(open_store(config, tmp_path)) as own:
            for ticket in range(8):
                own.put_many(group(ticket))

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert store.count() == 16


@pytest.mark.slow
def test_a_database_that_cannot_be_reached_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql://nobody@127.0.0.1:{free_port()}/none"
    with pytest.raises(UniRLError, match="cannot be used for trajectories"):
        open_store(StoreConfig(url=url), tmp_path)
