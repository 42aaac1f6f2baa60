"""What `unirl view` costs where 200 runs of 100 000 rows and a store of 100 000 episodes are looked
at. What it costs a run that is watched: view_watched.py.

    python benchmarks/view.py --write                    # into RESULTS.md
    python benchmarks/view.py --make FOLDER              # the folders alone
    python benchmarks/view.py --folder FOLDER

Rows are written by the run's own writer, with the names of a run of appo, for four runs; the files
of the other runs are hard links to these four, as 200 times 80 MB would take an hour to write. The
server reads each as a file of its own. Files are in the page cache: what a disk takes is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
from trajectory_store import fill

from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.store import open_store
from unirl.report.sinks import JsonlSink

NUM_RUNS, NUM_ROWS, NUM_EPISODES, NUM_WRITTEN = 200, 100_000, 100_000, 4
FIRST_CHARTS = (
    "charts/episodic_return", "eval/return_mean", "perf/sps", "perf/produced_sps",
    "losses/policy", "losses/value", "losses/entropy", "queue/ready",
)  # fmt: skip
NAMES = (
    *FIRST_CHARTS, "charts/episodes", "charts/episodic_length", "charts/updates",
    "losses/approx_kl", "losses/behaviour_kl", "losses/clip_fraction", "losses/grad_norm",
    "losses/explained_variance", "losses/learning_rate", "staleness/max", "staleness/mean",
    "staleness/age/0", "staleness/age/1", "staleness/in_flight", "staleness/in_queue",
    "queue/running", "queue/discarded/stale", "time/actor/wait", "time/actor/work",
    "time/learner/wait", "time/learner/work", "time/seconds", "perf/updates_per_second",
    "eval/return_std", "time/eval", "faults/actor_restarts", "faults/late_calls",
    "queue/learned/actor", "time/checkpoint", "losses/epochs",
)  # fmt: skip
CONFIG = """recipe = "appo"

[env]
id = "CartPole-v1"

[learner.optimizer]
lr = {lr}

[run]
seed = {seed}
total_steps = 200000000
"""


def make_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(NUM_RUNS):
        run = folder / f"run-{number:03d}"
        run.mkdir()
        lr, seed = f"{0.001 * (1 + number // 5):g}", number % 5
        (run / "config.toml").write_text(CONFIG.format(lr=lr, seed=seed))
        (run / "command.txt").write_text(f"unirl train appo --run.seed {seed}\n")
        began = {"time": time.time() - 2 * NUM_ROWS, "event": "started", "member": "run", "step": 0}
        ended = {"time": time.time(), "event": "ended", "member": "run", "cause": "total_steps"}
        (run / "events.jsonl").write_text(f"{json.dumps(began)}\n{json.dumps(ended)}\n")
        if number < NUM_WRITTEN:
            write_rows(run / "metrics.jsonl", number)
        else:
            os.link(folder / f"run-{number % NUM_WRITTEN:03d}/metrics.jsonl", run / "metrics.jsonl")
    with contextlib.closing(open_store(StoreConfig(), folder / "run-000")) as store:
        fill(store, NUM_EPISODES)


def write_rows(path: Path, seed: int) -> None:
    draw, values = random.Random(seed), dict.fromkeys(NAMES, 0.0)
    sink = JsonlSink(path)
    for number in range(NUM_ROWS):
        values = {name: value + draw.gauss(0, 1) for name, value in values.items()}
        sink.write(number * 2048, values)
    sink.close()


class Server:
    """`unirl view` as a process of its own, and what a browser would ask it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "unirl", "view", str(folder.resolve()), "--port", "0"]
        self.process = subprocess.Popen(
            command, cwd=measure.ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"(http://\S+)/\?token=(\S+)", self.process.stdout.readline())
        assert found is not None
        self.url, self.token = found.groups()

    def open(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers))

    def ask(self, path: str) -> tuple[Any, float]:
        """The answer and the seconds that it took."""
        begin = time.perf_counter()
        with self.open(path) as answer:
            data = answer.read()
        return json.loads(data), time.perf_counter() - begin

    @property
    def cpu_seconds(self) -> float:
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def peak_mb(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+)", text)
        assert found is not None
        return int(found[1]) / 1024

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        server.end()


def many(folder: Path) -> list[tuple[str, str]]:
    """Claims about many runs, each with what was measured."""
    begin = time.perf_counter()
    with served(folder) as server:
        started = time.perf_counter() - begin
        runs, listed = server.ask("/api/runs")
        by_name = {run["name"]: run["id"] for run in runs}
        first = by_name["run-000"]
        charts = ",".join(FIRST_CHARTS)
        seconds = [server.ask(f"/api/runs/{first}{path}")[1] for path in ("", "/names", "/events")]
        seconds.append(server.ask(f"/api/series?runs={first}&names={charts}&points=800")[1])
        _, index = server.ask(f"/api/runs/{first}/episodes")
        filters = ask_filters(server, first)
        for number in range(1, 21):  # a person who clicks through runs
            run = by_name[f"run-{number:03d}"]
            server.ask(f"/api/series?runs={run}&names={charts}&points=800")
        some = ",".join(by_name[f"run-{number:03d}"] for number in range(5, 10))
        _, group = server.ask(f"/api/series?runs={some}&names=charts/episodic_return&points=800")
        _, everything = server.ask(f"/api/series?runs={first}&names={','.join(NAMES)}&points=800")
        _, again = server.ask(f"/api/series?runs={first}&names={charts}&points=800&x=seconds")
        return [
            ("the server answers after its start", f"{started:.2f} s"),
            (f"list of {len(runs)} runs, cold", f"{listed:.3f} s"),
            (f"one run: settings, names, events and {len(FIRST_CHARTS)} charts of "
             f"{NUM_ROWS:,} rows, cold", f"{sum(seconds):.2f} s"),
            ("list and first charts together (<= 2 s)", f"{listed + sum(seconds):.2f} s"),
            (f"one chart of 5 more such runs, cold: {5 * NUM_ROWS:,} rows", f"{group:.2f} s"),
            (f"all {len(NAMES)} charts of a run, cold", f"{everything:.2f} s"),
            (f"{len(FIRST_CHARTS)} charts again, over seconds", f"{again:.3f} s"),
            (f"{NUM_EPISODES:,} episodes: the first list, cold", f"{index:.2f} s"),
            (f"{len(filters)} filters over them: median, slowest (<= 0.3 s)",
             f"{statistics.median(filters):.3f} s, {max(filters):.3f} s"),
            ("largest memory of the server (<= 300 MB)", f"{server.peak_mb:.0f} MB"),
        ]  # fmt: skip


def ask_filters(server: Server, run: str) -> list[float]:
    draw, found = random.Random(1), []
    for _ in range(100):
        parts = {
            "task": f"task{draw.randrange(20)}",
            "ending": draw.choice(("stop", "context")),
            "reward_min": "0.5",
            "version_max": "3",
            "sort": draw.choice(("new", "old", "reward", "-tokens", "seconds")),
            "after": str(draw.randrange(1000)),
            "text": draw.choice(("21", "nothing that is there")),
        }
        chosen = draw.sample(sorted(parts), draw.randrange(1, 4))
        query = "&".join(f"{name}={parts[name].replace(' ', '%20')}" for name in chosen)
        found.append(server.ask(f"/api/runs/{run}/episodes?{query}")[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make", type=Path, help="write the folders of 200 runs here, and end")
    parser.add_argument("--folder", type=Path, help="use these, written by --make")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    options = parser.parse_args()
    if options.make is not None:
        make_folder(options.make)
        return
    measure.exit_on_terminate()
    folder = options.folder or Path(tempfile.mkdtemp()) / "runs"
    if options.folder is None:
        make_folder(folder)
    text = measure.table(("what", "measured"), many(folder))
    print(text)
    if options.write:
        measure.write_block("view-many", text)
    if options.folder is None:
        shutil.rmtree(folder.parent)


if __name__ == "__main__":
    main()
