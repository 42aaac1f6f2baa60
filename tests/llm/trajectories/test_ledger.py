"""Each ticket is learned from once, whatever dies; and the writer slows and ends nothing."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import unirl
from tests.llm.trajectories.stored_episodes import group, record, straight, write_until_killed
from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode
from unirl.llm.agents.sample import write_episodes
from unirl.llm.group import GroupShape, read_group
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.filter import Filter
from unirl.llm.trajectories.keeper import make_keeper
from unirl.llm.trajectories.ledger import Ledger
from unirl.llm.trajectories.run_ledger import RunLedger, make_ledger
from unirl.llm.trajectories.store import TrajectoryStore, open_store
from unirl.llm.trajectories.writer import TrajectoryWriter


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrajectoryStore]:
    with closing(open_store(StoreConfig(), tmp_path)) as store:
        yield store


def fill(store: TrajectoryStore, *tickets: int) -> None:
    store.put_many([each for ticket in tickets for each in group(ticket)])


def states(store: TrajectoryStore) -> dict[int, str]:
    return {row["ticket"]: row["state"] for row in store.find()}


def test_a_group_is_leased_whole_and_acknowledged_once(store: TrajectoryStore) -> None:
    fill(store, 1, 2)
    store.put(group(3)[0])  # the other one of its group has not come yet
    ledger = Ledger(store)
    taken = ledger.lease(5, "a")
    assert [each.ticket for each in taken] == [1, 2]
    assert taken[0].records == tuple(group(1, state="leased"))
    assert ledger.lease(5, "b") == []
    assert ledger.acknowledge("b", taken, 1) == []
    assert ledger.acknowledge("a", taken, 1) == taken
    assert ledger.acknowledge("a", taken, 2) == []
    assert states(store) == {1: "trained", 2: "trained", 3: "done"}


def test_a_lease_that_has_expired_is_anothers(store: TrajectoryStore) -> None:
    fill(store, 1)
    ledger = Ledger(store)
    first = ledger.lease(1, "a", seconds=-1.0)
    assert len(first) == 1 and [each.ticket for each in ledger.lease(1, "b")] == [1]
    assert ledger.acknowledge("a", first, 1) == []
    assert ledger.release("b") == 1 and states(store) == {1: "done"}


def test_a_mark_may_come_before_its_episodes(store: TrajectoryStore) -> None:
    ledger = Ledger(store)
    assert ledger.mark_trained("test", [4, 5], 7) == [4, 5]
    assert ledger.mark_trained("test", [5, 6], 8) == [6]
    fill(store, 4, 5, 6)
    assert set(states(store).values()) == {"trained"} and ledger.lease(9, "a") == []
    assert {row["trained_version"] for row in store.find(Filter(ticket=5))} == {7}


def test_a_run_that_is_resumed_releases_what_later_updates_learned(store: TrajectoryStore) -> None:
    fill(store, 1, 2, 3)
    ledger = Ledger(store)
    for ticket in (1, 2, 3):
        ledger.mark_trained("test", [ticket], ticket)
    assert ledger.release_after("test", 1) == [2, 3]
    assert states(store) == {1: "trained", 2: "done", 3: "done"}
    # Ticket 2 is drawn again, differently: the first attempt is void.
    store.put_many([record(straight(900 + p), ticket=2, place=p, prompt=()) for p in range(2)])
    assert sorted(row["state"] for row in store.find(Filter(ticket=2))) == [
        "done", "done", "expired", "expired",
    ]  # fmt: skip
    assert ledger.mark_trained("test", [2], 2) == [2]
    # An attempt that comes when its ticket was learned from is never learned from.
    store.put(record(straight(999), ticket=2, place=0, prompt=()))
    assert store.num_late == 1 and [each.ticket for each in ledger.lease(9, "a")] == [3]


def test_consumers_that_take_at_once_never_share_a_group(tmp_path: Path) -> None:
    with closing(open_store(StoreConfig(), tmp_path)) as store:
        fill(store, *range(30))
    found: list[int] = []

    def consume(name: str) -> None:
        with closing(open_store(StoreConfig(), tmp_path)) as own:
            ledger = Ledger(own)
            while taken := ledger.lease(2, name):
                found.extend(each.ticket for each in ledger.acknowledge(name, taken, 1))

    threads = [threading.Thread(target=consume, args=(f"c{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(30))


def test_groups_can_be_learned_from_again(store: TrajectoryStore) -> None:
    fill(store, 1, 2)
    ledger = Ledger(store)
    ledger.mark_trained("test", [1], 1)
    stored = list(ledger.groups("test"))
    assert [each.ticket for each in stored] == [1, 2] and list(ledger.groups("other")) == []
    shape = GroupShape(2, 4, 200, num_rewards=2, max_segments=1)
    data = shape.spec().allocate()
    records = stored[0].records
    scores = [list(each.scores.values()) for each in records]
    write_episodes(data, stored[0].prompt, [each.episode for each in records], scores, shape, {})
    found = read_group(data, 1)
    assert found.size == 2 and tuple(found.token[:25].tolist()) == records[0].episode.turns[0].given


def test_a_full_queue_drops_bodies_and_no_rows(tmp_path: Path) -> None:
    store = open_store(StoreConfig(), tmp_path)
    writer = TrajectoryWriter(store, StoreConfig(max_bodies=3))
    with store.lock:  # as a database that hangs
        begin = time.monotonic()
        for ticket in range(10):
            writer.keep(group(ticket))
        assert time.monotonic() - begin < 5.0
    assert writer.flush(60)
    assert writer.stats()["dropped_bodies"] >= 10 and writer.stats()["failed"] == 0
    rows = store.find()
    assert len(rows) == 20 and {row["turns"] for row in rows} == {2}
    kept = sum(row["body_size"] is not None for row in rows)
    assert kept == 20 - writer.stats()["dropped_bodies"]
    assert all(len(store.steps(row["id"])) == 2 for row in rows)
    writer.close()


def test_a_full_disk_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(StoreConfig(), tmp_path)
    store.database.execute("PRAGMA max_page_count = 60")
    writer = TrajectoryWriter(store, StoreConfig(max_bodies=1000))
    with caplog.at_level(logging.WARNING):
        for ticket in range(60):
            writer.keep(group(ticket))
        assert writer.flush(60)
    stats = writer.stats()
    assert stats["failed"] > 0 and stats["episodes"] > 0
    assert stats["episodes"] == store.count()
    assert len(caplog.records) == 1 and "full" in caplog.text
    store.database.execute("PRAGMA max_page_count = 1000000")  # there is room again
    before = store.count()
    writer.keep(group(100))
    assert writer.flush(60) and store.count() == before + 2
    writer.close()
    writer.close()
    with closing(open_store(StoreConfig(), tmp_path)) as again:  # nothing is torn
        for row in again.find(limit=1000):
            again.get(row["id"])


def test_a_record_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path) -> None:
    store = open_store(StoreConfig(), tmp_path)
    writer = TrajectoryWriter(store)
    bad = record(Episode([], why="x"), ticket=9, place=0, task=object())
    with store.lock:
        writer.keep([*group(1), bad, *group(2)])
    assert writer.flush(60)
    assert writer.stats()["failed"] == 1 and store.count() == 4
    writer.close()


def kill_many(tmp_path: Path, times: int) -> None:
    """kill -9 of the process that writes, at any moment; then what it had acknowledged is there."""
    put: set[int] = set()
    trained: list[int] = []
    for number in range(times):
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                os.close(reading)
                write_until_killed(tmp_path, os.fdopen(writing, "w"))
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as said:
            lines = [said.readline() for _ in range(3 + 7 * number % 11)]
            time.sleep(0.001 * (number % 7))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            lines += [line for line in said if line.endswith("\n")]
        for word, ticket in map(str.split, lines):
            (put.add if word == "put" else trained.append)(int(ticket))
    with closing(open_store(StoreConfig(), tmp_path)) as store:
        assert store.database.execute("PRAGMA integrity_check") == [("ok",)]
        rows = store.find(limit=10**6)
        for row in rows:
            assert store.get(row["id"]).episode == straight(100 * row["ticket"] + row["place"])
        there = [(row["ticket"], row["place"]) for row in rows]
        assert len(set(there)) == len(there)
        assert {(ticket, place) for ticket in put for place in range(2)} <= set(there)
        assert len(set(trained)) == len(trained) > 0
        now = {row["ticket"] for row in rows if row["state"] == "trained"}
        assert set(trained) <= now


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    kill_many(tmp_path, 15)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_in_two_hundred_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 200)


def test_memory_is_bounded_by_what_may_wait(tmp_path: Path) -> None:
    store = open_store(StoreConfig(), tmp_path)
    writer = TrajectoryWriter(store, StoreConfig(max_bodies=2))
    with store.lock:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for ticket in range(200):
            writer.keep([record(straight(ticket, tokens=4000), ticket=ticket, place=0)])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 60_000  # KB; with all tokens it would be some 100 000
    writer.flush(60)
    writer.close()


def test_a_writer_sees_how_far_the_policy_is_by_its_episodes(tmp_path: Path) -> None:
    writer = TrajectoryWriter(open_store(StoreConfig(), tmp_path), StoreConfig(max_lag=4))
    for version in (2, 9, 3):
        episode = straight(version, version=version)
        writer.keep([record(episode, ticket=version, created=time.time())])
    assert writer.flush(60)
    writer._sweep()
    assert writer.stats()["expired"] == 2
    writer.close()


def test_a_store_that_breaks_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database" * 100)
    assert make_keeper(StoreConfig(), tmp_path, {}, {}) is None
    (tmp_path / FILE).unlink()
    keeper = make_keeper(StoreConfig(), tmp_path, {"exact": 1.0}, {})
    assert keeper is not None
    keeper.keep(None, None, [Episode([])], [[]])  # type: ignore[arg-type]
    assert keeper._writer.stats()["failed"] == 1
    keeper.close()


def made(folder: Path, **settings: Any) -> RunLedger:
    found = make_ledger(folder, config=StoreConfig(**settings))
    assert found is not None
    return found


def test_a_run_marks_behind_its_updates_and_has_all_marks_at_a_flush(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    with closing(open_store(StoreConfig(), tmp_path)) as store:
        with store.transaction():  # as another process that writes for a while
            begin = time.perf_counter()
            for update in range(1, 1001):
                ledger.trained([2 * update, 2 * update + 1], update)
            assert time.perf_counter() - begin < 1.0
        ledger.flush()
        count = "SELECT COUNT(*), COUNT(DISTINCT ticket), MAX(update_number) FROM lease"
        assert store.database.execute(count) == [(2000, 2000, 1000)]
        ledger.released_after(10)
        assert store.database.execute(count) == [(20, 20, 10)]
        ledger.trained([22, 3], 11)  # 3 was learned from at update 1
        ledger.flush()
    assert ledger.stats() == {
        "store/marked": 2001, "store/trained_twice": 1, "store/unmarked": 0,
    }  # fmt: skip
    ledger.close()
    ledger.close()


@pytest.mark.parametrize("is_required", [False, True])
def test_marks_wait_for_a_store_that_cannot_be_written(tmp_path: Path, is_required: bool) -> None:
    ledger = made(tmp_path, required=is_required)
    # A disk that is full: no page more than there are.
    ledger._store.database.execute("PRAGMA max_page_count = 1")
    for update in range(300):
        ledger.trained(range(100 * update, 100 * update + 100), update)
    begin = time.monotonic()
    if is_required:
        with pytest.raises(UniRLError, match="could not be marked"):
            ledger.flush()
    else:
        ledger.flush()
    assert time.monotonic() - begin < 10.0
    ledger._store.database.execute("PRAGMA max_page_count = 1000000")
    ledger.flush()
    assert ledger.stats()["store/marked"] == 30_000
    ledger.close()


def test_a_second_connection_of_a_process_leaves_the_locks_of_the_first(tmp_path: Path) -> None:
    """SQLite's locks are the process's: a file that is closed gives all of them up."""
    with closing(open_store(StoreConfig(), tmp_path)) as first:
        fill(first, 1)
        with closing(open_store(StoreConfig(), tmp_path)):
            pass
        # Another process must not find that it alone has the file.
        code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
        code += "c.execute('SELECT COUNT(*) FROM episode').fetchone(); c.close()"
        subprocess.run([sys.executable, "-c", code, tmp_path / FILE], check=True, timeout=60)
        assert (tmp_path / f"{FILE}-wal").exists(), "its log was taken away"
        fill(first, 2)
    with closing(open_store(StoreConfig(), tmp_path)) as store:
        assert store.database.execute("PRAGMA integrity_check") == [("ok",)]
        assert states(store) == {1: "done", 2: "done"}


def test_runs_of_one_name_in_one_database_have_tickets_of_their_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    configs = [StoreConfig(url=url).with_id() for _ in range(2)]
    assert len({each.run_id for each in configs}) == 2
    assert configs[0].with_id() == configs[0], "a run that is continued keeps its id"
    assert not StoreConfig().with_id().run_id, "a run's own file needs none"
    for i, config in enumerate(configs):
        (tmp_path / str(i) / "run").mkdir(parents=True)
        ledger = make_ledger(tmp_path / str(i) / "run", config=config)
        assert ledger is not None
        with closing(ledger):
            ledger.trained([0, 1], 1)
            ledger.flush()
            assert ledger.stats()["store/marked"] == 2


def test_a_run_with_a_database_of_several_keeps_its_id_in_its_config(tmp_path: Path) -> None:
    def run_id(**more: str) -> str:
        plan = unirl.make_plan("agent", **settings, **more)
        return str(plan.config.store.run_id)  # type: ignore[union-attr]

    settings: dict[str, Any] = {
        "agent.tools": ["calculator"],
        "agent.calls": "brief",
        "model.path": "tiny",
        "task.name": "products",
        "agent.max_episode_tokens": 64,
        "sampling.max_tokens": 8,
        "store.url": f"sqlite:///{tmp_path / 'shared.db'}",
    }
    own = run_id()
    assert own and run_id() != own and run_id(**{"store.run_id": own}) == own
