"""What `unirl view` costs where 100 000 episodes are in a Postgres that another run writes to, too.

    python benchmarks/view_store.py --write

The database has as many episodes of another run, between those of the one that is looked at.
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
from unirl.llm.trajectories.databases.schema import EPISODE
from unirl.llm.trajectories.store import TrajectoryStore, open_store

RUNS, NUM_WRITTEN = ("bench", "another"), 100
CONFIG = """recipe = "agent"

[store]
url = "env:UNIRL_BENCHMARK_STORE"
"""


def fill(store: TrajectoryStore) -> None:
    """The first ones by the store itself; the others are their copies, as 200 000 take minutes."""
    made, begin = [episode(100, 2, seed) for seed in range(NUM_WRITTEN)], time.time() - NUM_EPISODES
    for run in RUNS:
        records = [record(each, n, begin + n) for n, each in enumerate(made)]
        store.put_many([replace(each, run=run) for each in records])
    own = ("ticket", "created", "finished", "hash", "id")
    same = ", ".join(name for name in (*EPISODE, "body_size") if name not in own)
    database = store.database
    database.execute(
        f"INSERT INTO episode (run, ticket, created, finished, hash, {same}) "
        f"SELECT run, ticket + {NUM_WRITTEN} * n, created + {NUM_WRITTEN} * n, finished, "
        f"decode(md5(hash::text || n), 'hex'), {same} FROM episode, "
        f"generate_series(1, {NUM_EPISODES // NUM_WRITTEN - 1}) n ORDER BY n, run, ticket"
    )
    database.execute(
        "INSERT INTO body SELECT copy.id, data FROM episode copy JOIN episode first "
        f"ON first.run = copy.run AND first.ticket = mod(copy.ticket, {NUM_WRITTEN}) "
        f"JOIN body ON body.ep = first.id WHERE copy.ticket >= {NUM_WRITTEN}"
    )
    database.execute("ANALYZE")


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
        text = measure.table(("what", "measured"), look(run.parent))
    print(text)
    if options.write:
        measure.write_block("view-store", text)


if __name__ == "__main__":
    main()
