"""What it costs a run to be looked at: a page of `unirl view` is open and closed in turns while one
run trains, and the rates of neighbouring windows are compared.

    python benchmarks/view_watched.py --write                # the page's questions, without drawing
    python benchmarks/view_watched.py --browser --write      # Chromium, on the same cores

Windows are open, closed, closed, open, and so on, so that a run that gets faster or slower adds
nothing. Of each the first second is left out: a page that opens asks for everything once, and rows
come every 0.2 s. The interval is that of the mean of the pairs' differences (95 %, Student's t).

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PAUSE_SECONDS = 1.5
"""Between two times that the page of a run asks again (app/src/pages/run.tsx)."""
LEFT_OUT_SECONDS = 1.0
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
                windows, cpu = [], [0.0, 0.0]
                for number in range(2 * pairs):
                    opens = number % 4 in (0, 3)
                    begin, before = time.time(), server.cpu_seconds
                    look(opens)
                    time.sleep(max(0.0, begin + seconds - time.time()))
                    windows.append((opens, begin + LEFT_OUT_SECONDS, time.time()))
                    cpu[opens] += server.cpu_seconds - before
                assert training.poll() is None, "the training ended before the last window"
    rate = rates(folder / "run")
    found = [(opens, rate(begin, end)) for opens, begin, end in windows]
    differences = []
    for first, second in zip(found[::2], found[1::2], strict=True):
        open_, closed = (first, second) if first[0] else (second, first)
        differences.append(open_[1] / closed[1] - 1)
    mean = statistics.mean(differences)
    half = STUDENT[pairs - 1] * statistics.stdev(differences) / pairs**0.5
    what = "in Chromium beside it" if in_browser else "by a client that draws nothing"
    return [
        (f"rate of a run while it is watched {what}, against the window beside it: mean of "
         f"{pairs} pairs of {seconds:g} s", f"{mean:+.2%} +- {half:.2%}"),
        ("median pair (lowest, highest)", f"{statistics.median(differences):+.2%} "
         f"({min(differences):+.2%}, {max(differences):+.2%})"),
        ("processor time of the server while it is watched, of one core (and otherwise)",
         f"{cpu[1] / pairs / seconds:.2%} ({cpu[0] / pairs / seconds:.2%})"),
    ]  # fmt: skip


def rates(run: Path) -> Callable[[float, float], float]:
    """Steps a second between two moments, in seconds since 1970."""
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    began = next(each["time"] for each in events if each["event"] == "started")
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    seconds, steps = (np.array([row[key] for row in rows]) for key in ("seconds", "step"))

    def rate(begin: float, end: float) -> float:
        at = np.interp([begin - began, end - began], seconds, steps)
        return float((at[1] - at[0]) / (end - begin))

    return rate


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
