"""What the trajectory store costs: claims about its speed, each measured in one run.

    python benchmarks/trajectory_store.py                 # put and slice by size, beside raw SQLite
    python benchmarks/trajectory_store.py --expire 100000
    python benchmarks/trajectory_store.py --rows 1000000

Raw SQLite is one row and one blob of the same bytes for each episode, in a transaction of its own,
with nothing encoded, indexed or compressed: what this machine's SQLite takes at the least. The
store encodes, compresses, hashes, redacts and indexes besides.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sqlite3
import struct
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import measure  # noqa: F401  (finds this clone)

from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.expiry import DAY, expire
from unirl.llm.trajectories.filter import Filter
from unirl.llm.trajectories.record import Record
from unirl.llm.trajectories.store import TrajectoryStore, open_store
from unirl.llm.trajectories.writer import TrajectoryWriter

SIZES = (("1 KB", 100, 2, 2000), ("16 KB", 1600, 8, 500), ("128 KB", 12800, 20, 80),
         ("1 MB", 104000, 60, 16))  # fmt: skip


def episode(tokens: int, turns: int, seed: int) -> Episode:
    """Half of the tokens drawn; ids as frequent as words are."""
    draw, found, size = random.Random(seed), [], tokens // turns
    for index in range(turns):
        ids = tuple(min(50000, int(draw.paretovariate(1.0))) for _ in range(size))
        half = size // 2
        logp = struct.unpack(
            f"{half}f", struct.pack(f"{half}f", *(-draw.expovariate(1) for _ in range(half)))
        )
        found.append(
            Turn(
                index - 1,
                ids[half:],
                Completion(ids[:half], logp, (seed % 7,) * half, "stop"),
                ({"role": "user", "content": "what is 17 + 4?"},),
                {"role": "assistant", "content": "it is 21"},
            )
        )
    return Episode(found, seconds=1.0)


def record(made: Episode, ticket: int, created: float = 0.0) -> Record:
    scores = {"exact": Score(float(ticket % 2))}
    return Record(made, "bench", ticket=ticket, task=f"task{ticket % 20}",
                  task_id=str(ticket % 5000), scores=scores,
                  created=created or time.time())  # fmt: skip


def raw_puts(folder: Path, body: bytes, count: int) -> float:
    """Puts a second of SQLite alone."""
    with closing(sqlite3.connect(folder / "raw.db", isolation_level=None)) as file:
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("CREATE TABLE body (id INTEGER PRIMARY KEY, name TEXT, data BLOB)")
        begin = time.perf_counter()
        for number in range(count):
            file.execute("BEGIN IMMEDIATE")
            file.execute("INSERT INTO body (name, data) VALUES (?, ?)", [str(number), body])
            file.execute("COMMIT")
        return count / (time.perf_counter() - begin)


def puts_and_slices() -> None:
    print("| episode | put/s | raw SQLite/s | part of it | in 32s/s | slice/s | bytes of a slice |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, tokens, turns, count in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder)
            made = [record(episode(tokens, turns, seed), seed) for seed in range(count)]
            with closing(open_store(StoreConfig(), where)) as store:
                begin = time.perf_counter()
                ids = [store.put(each) for each in made]
                rate = count / (time.perf_counter() - begin)
                together = [replace(each, ticket=each.ticket + count) for each in made]
                begin = time.perf_counter()
                for first in range(0, count, 32):
                    store.put_many(together[first : first + 32])
                batched = count / (time.perf_counter() - begin)
                raw = raw_puts(where, made[0].body()[0], count)
                draw, before = random.Random(1), store.bytes_read
                begin = time.perf_counter()
                for _ in range(2000):
                    ep = draw.choice(ids)
                    assert ep is not None
                    store.turn(ep, draw.randrange(turns))
                slices = 2000 / (time.perf_counter() - begin)
                read = (store.bytes_read - before) / 2000
                print(f"| {name} | {rate:,.0f} | {raw:,.0f} | {rate / raw:.2f} | {batched:,.0f} "
                      f"| {slices:,.0f} | {read:,.0f} |", flush=True)  # fmt: skip


def fill(store: TrajectoryStore, count: int) -> None:
    made = [episode(100, 2, seed) for seed in range(64)]
    begin = time.time() - 1000 * DAY
    for first in range(0, count, 256):
        numbers = range(first, min(count, first + 256))
        store.put_many([record(made[n % 64], n, begin + n * 1000 * DAY / count) for n in numbers])


def expiring(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        where, now = Path(folder), time.time()
        with closing(open_store(StoreConfig(), where)) as store:
            fill(store, count)
            slowest, is_done = 0.0, threading.Event()

            def write() -> None:
                nonlocal slowest
                number = 10 * count
                with closing(open_store(StoreConfig(), where)) as own:
                    while not is_done.wait(0.005):
                        number += 1
                        begin = time.perf_counter()
                        own.put(record(episode(100, 2, number), number))
                        slowest = max(slowest, time.perf_counter() - begin)

            thread = threading.Thread(target=write)
            thread.start()
            begin = time.perf_counter()
            found = expire(store, StoreConfig(expire_days=900.0), now=now)
            seconds = time.perf_counter() - begin
            is_done.set()
            thread.join()
            print(f"{found} of {count:,} expired in {seconds:.2f} s; "
                  f"the slowest put beside it took {1000 * slowest:.0f} ms")  # fmt: skip


def many_rows(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        with closing(open_store(StoreConfig(), where)) as store:
            begin = time.perf_counter()
            fill(store, count)
            seconds = time.perf_counter() - begin
            size = os.path.getsize(where / "trajectories.db") / count
            print(f"{count:,} episodes in {seconds:.0f} s, {size:,.0f} bytes each")
            for which in (
                Filter(), Filter(task="task3"), Filter(task="task3", task_id="123"),
                Filter(ticket=count // 2, run="bench"), Filter(ending="time"),
                Filter(task="task3", reward_min=0.5),
            ):  # fmt: skip
                begin = time.perf_counter()
                found = len(store.find(which))
                print(f"  {1000 * (time.perf_counter() - begin):6.1f} ms, {found} lines: {which}")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        writer = TrajectoryWriter(open_store(StoreConfig(), where))
        made = [episode(12800, 20, seed) for seed in range(8)]
        for number in range(1000):
            writer.keep([record(made[number % 8], 10 * count + number)])
        writer.flush(120)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
        print(
            f"the writer of 1,000 episodes of 128 KB needed {grown:.0f} MB more; {writer.stats()}"
        )
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expire", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0)
    options = parser.parse_args()
    if options.expire:
        expiring(options.expire)
    elif options.rows:
        many_rows(options.rows)
    else:
        puts_and_slices()


if __name__ == "__main__":
    main()
