"""What `unirl view` costs where 100 000 episodes are in a Postgres that another run writes to, too.

    python benchmarks/view_store.py --write

The database has the episodes of two runs in turns, 50 episodes a transaction; one run is looked at.
Postgres is that of Debian, started for this alone, on the same machine, with fsync off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import measure
from trajectory_store import episode, record
from view import NUM_EPISODES, ask_filters, served

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.llm.trajectories.services import postgres
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.store import TrajectoryStore, open_store

CONFIG = """recipe = "agent"

[store]
url = "env:UNIRL_BENCHMARK_STORE"
"""


def fill(store: TrajectoryStore) -> None:
    made, begin = [episode(100, 2, seed) for seed in range(64)], time.time() - NUM_EPISODES
    for first in range(0, NUM_EPISODES, 50):
        for run in ("bench", "another"):
            records = [record(made[n % 64], n, begin + n) for n in range(first, first + 50)]
            store.put_many([replace(each, run=run) for each in records])


def look(folder: Path) -> list[tuple[str, str]]:
    with served(folder) as server:
        run = server.ask("/api/runs")[0][0]["id"]
        found, first = server.ask(f"/api/runs/{run}/episodes")
        assert found["total"] == NUM_EPISODES, found["total"]
        opened = [server.ask(f"/api/runs/{run}/episodes/{row['id']}")[1] for row in found["rows"]]
        filters = ask_filters(server, run)
        return [
            (f"{NUM_EPISODES:,} episodes: the first list, cold", f"{first:.2f} s"),
            (f"{len(filters)} filters over them: median, slowest (<= 0.3 s)",
             f"{statistics.median(filters):.3f} s, {max(filters):.3f} s"),
            (f"{len(opened)} episodes opened: median, slowest",
             f"{statistics.median(opened):.3f} s, {max(opened):.3f} s"),
            ("largest memory of the server (<= 300 MB)", f"{server.peak_mb:.0f} MB"),
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    options = parser.parse_args()
    measure.exit_on_terminate()
    with postgres() as url, tempfile.TemporaryDirectory() as name:
        os.environ["UNIRL_BENCHMARK_STORE"] = url
        run = Path(name) / "bench"
        run.mkdir()
        (run / "config.toml").write_text(CONFIG)
        with closing(open_store(StoreConfig(url=url), run)) as store:
            fill(store)
            store.database.execute("ANALYZE")
        text = measure.table(("what", "measured"), look(run.parent))
    print(text)
    if options.write:
        measure.write_block("view-store", text)


if __name__ == "__main__":
    main()
