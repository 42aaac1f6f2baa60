"""What it costs a run to be looked at: a page of `unirl view` is open and closed in turns while one
run trains, and neighbouring windows are compared.

    python benchmarks/view_watched.py --write                # the page's questions, without drawing
    python benchmarks/view_watched.py --browser --write      # Chromium, on the same cores

Windows are open, closed, closed, open, and so on, so that a run that gets faster or slower adds
nothing. Of each the first second is left out: a page that opens asks for everything once, and rows
come every 0.2 s. Intervals are those of the mean of the pairs' differences (95 %, Student's t).

The rate of a run on two cores changes by a tenth from one window to the next, watched or not. Far
steadier is what it costs: the processor time that the run needs for a step, and the processor
time that the server needs. A run that has use for all cores loses the sum of both.

A person's browser is mostly on another machine; without --browser a client asks what the page of a
run asks, as often as the page does where rows arrive all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure
import numpy as np
from view import FIRST_CHARTS, Server, served

from unirl.bench import usage
from unirl.host import usable_cores

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PAUSE_SECONDS = 1.5
"""Between two times that the page of a run asks again (app/src/pages/run.tsx)."""
LEFT_OUT_SECONDS = 1.0
NUM_CORES = usable_cores()
# Quantiles of Student's t at 0.975.
STUDENT = {5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 13: 2.160, 15: 2.131, 19: 2.093, 23: 2.069}

Look = Callable[[bool], None]
"""Opens the page, or closes it."""


@contextlib.contextmanager
def trained(folder: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-m", "unirl", "train", "@cartpole", "--name", "run", "--runs-dir",
        str(folder), "--runner.kind", "processes", "--run.total-steps", "1000000000",
        "--run.max-seconds", str(seconds), "--run.target-return", "none", "--run.log-seconds",
        "0.2", "--run.eval-steps", "0",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=measure.ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def client(server: Server, run: str) -> Iterator[Look]:
    """Asks as the page does, and listens to news as it does."""
    is_open, is_over = threading.Event(), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            if not is_open.wait(0.1):
                continue
            server.ask("/api/runs")
            for path in ("", "/names", "/events", "/staleness"):
                server.ask(f"/api/runs/{run}{path}")
            names = ",".join(FIRST_CHARTS)
            server.ask(f"/api/series?runs={run}&names={names}&points=1000")
            is_over.wait(PAUSE_SECONDS)

    def listen() -> None:
        while not is_over.is_set():
            if is_open.wait(0.1):
                with contextlib.suppress(OSError), server.open(f"/api/live?runs={run}") as news:
                    while is_open.is_set() and news.readline():
                        pass

    threads = [threading.Thread(target=each, daemon=True) for each in (ask, listen)]
    for thread in threads:
        thread.start()
    yield lambda opens: is_open.set() if opens else is_open.clear()
    is_over.set()
    threads[0].join()


@contextlib.contextmanager
def chromium(server: Server, run: str) -> Iterator[Look]:
    from tests.view.browser import Visit, browser

    with browser() as started:
        context = started.new_context(viewport={"width": 1280, "height": 800})
        visit = Visit(context, f"{server.url}/?token={server.token}")
        yield (
            lambda opens: (
                visit.page.goto(f"{server.url}/#/runs/{run}" if opens else "about:blank") and None
            )
        )


def watched(folder: Path, pairs: int, seconds: float, in_browser: bool) -> list[tuple[str, str]]:
    rows = folder / "run" / "metrics.jsonl"
    total = 15 + 2 * pairs * seconds
    with trained(folder, total) as training:
        while not rows.exists() or rows.stat().st_size < 20_000:
            assert training.poll() is None, "the training ended"
            time.sleep(0.2)
        with served(folder) as server:
            run = server.ask("/api/runs")[0][0]["id"]
            with (chromium if in_browser else client)(server, run) as look:
                windows = []
                for number in range(2 * pairs):
                    opens, end = number % 4 in (0, 3), time.time() + seconds
                    look(opens)
                    time.sleep(LEFT_OUT_SECONDS)
                    begin, before = time.time(), spent(training.pid, server)
                    time.sleep(max(0.0, end - time.time()))
                    after = spent(training.pid, server)
                    windows.append((opens, begin, time.time(), after - before))
                assert training.poll() is None, "the training ended before the last window"
    steps = steps_at(folder / "run")
    found = [
        (opens, np.array([steps(end) - steps(begin), *cpu]) / (end - begin))
        for opens, begin, end, cpu in windows
    ]  # each: steps, the run's and the server's seconds of a core, a second
    pairs_of = [
        (first[1], second[1]) if first[0] else (second[1], first[1])
        for first, second in zip(found[::2], found[1::2], strict=True)
    ]
    rate = interval([open_[0] / closed[0] - 1 for open_, closed in pairs_of])
    cost = interval(
        [open_[1] / open_[0] / (closed[1] / closed[0]) - 1 for open_, closed in pairs_of]
    )
    extra = interval([(open_[2] - closed[2]) / NUM_CORES for open_, closed in pairs_of])
    used = statistics.mean(closed[1] for _, closed in pairs_of)
    what = "in Chromium beside it" if in_browser else "by a client that draws nothing"
    return [
        (f"rate of a run while it is watched {what}, against the window beside it, {pairs} pairs "
         f"of {seconds:g} s", rate),
        ("processor time that the run needs for a step, in the same windows", cost),
        (f"processor time of the server for who watches, of {NUM_CORES} cores", extra),
        ("cores that the run uses while nobody watches", f"{used:.2f}"),
    ]  # fmt: skip


def spent(training: int, server: Server) -> Any:
    """Seconds of a core so far: of all processes of the run, and of the server."""
    return np.array([usage.tree_cpu_seconds(training), server.cpu_seconds])


def interval(differences: list[float]) -> str:
    number = len(differences)
    half = STUDENT[number - 1] * statistics.stdev(differences) / number**0.5
    return f"{statistics.mean(differences):+.2%} +- {half:.2%}"


def steps_at(run: Path) -> Callable[[float], float]:
    """Steps that were learned from at a moment, in seconds since 1970."""
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    began = next(each["time"] for each in events if each["event"] == "started")
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    seconds, steps = (np.array([row[key] for row in rows]) for key in ("seconds", "step"))
    return lambda moment: float(np.interp(moment - began, seconds, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12, choices=[each + 1 for each in STUDENT])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window")
    parser.add_argument("--browser", action="store_true", help="in Chromium, on this machine")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    options = parser.parse_args()
    measure.exit_on_terminate()
    with tempfile.TemporaryDirectory() as folder:
        found = watched(Path(folder), options.pairs, options.seconds, options.browser)
    text = measure.table(("what", "measured"), found)
    print(text)
    if options.write:
        measure.write_block("view-watched-browser" if options.browser else "view-watched", text)


if __name__ == "__main__":
    main()
