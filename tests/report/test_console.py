"""The console: what a run's numbers mean is said in words, in 80 columns or in greppable lines."""

from __future__ import annotations

import io
import math
import os
import pty
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from unirl.report.console import (
    Console,
    LiveConsole,
    Progress,
    limiting_rate,
    make_console,
    sparkline,
    waiting_share,
)

SCALARS = {
    "charts/episodic_return": 412.34,
    "charts/episodic_length": 412.0,
    "losses/policy": -0.01234,
    "losses/value": 0.4321,
    "losses/entropy": 0.6123,
    "losses/grad_norm": 1234.5,
    "losses/learning_rate": 2.5e-4,
    "staleness/mean": 0.83,
    "staleness/max": 2,
    "staleness/in_flight": 0.5,
    "staleness/in_queue": 0.33,
    "queue/ready": 1,
    "queue/running": 15,
    "queue/discarded/stale": 3,
    "queue/discarded/failed": 0,
    "time/actor/wait": 0.1,
    "time/actor/work": 0.9,
    "time/learner/wait": 0.6,
    "time/learner/work": 0.4,
    "perf/sps": 182_410.3,
    "perf/produced_sps": 183_000.7,
    "faults/actor_restarts": 1,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(scalars: dict[str, float], width: int = 80, total_steps: int = 1_000_000) -> str:
    """The live panel after one update, as text."""
    console = RichConsole(file=Terminal(), width=width, height=40, color_system=None)
    live = LiveConsole("impala · ALE/Pong-v5", Progress(total_steps), Path("runs/pong"), console)
    live.update(300_000, scalars)
    live.close()
    with console.capture() as capture:
        console.print(live.render())
    return capture.get()


def plain_lines(*updates: dict[str, float]) -> list[dict[str, str]]:
    stream = io.StringIO()
    console = make_console("impala", Progress(1_000_000), Path("runs/pong"), stream)
    for number, scalars in enumerate(updates, 1):
        console.update(100_000 * number, scalars)
    console.close()
    first, *lines = stream.getvalue().splitlines()
    assert first == "impala -> runs/pong"
    return [dict(pair.split("=") for pair in line.split(" ")) for line in lines]


def test_where_there_is_no_terminal_a_line_says_what_matters_most() -> None:
    (line,) = plain_lines(SCALARS)
    assert line.pop("elapsed") == "0:00:00" and line.pop("left") == "0:00:04"
    assert line == {
        "step": "100000/1000000",
        "return": "412.3",
        "best": "412.3",
        "sps": "182410",
        "limited_by": "production",
        "discarded": "3",
        "restarts": "1",
    }


def test_lines_are_seconds_apart_but_for_evaluations_and_the_last_one() -> None:
    evaluated = {**SCALARS, "eval/return_mean": 475.0}
    lines = plain_lines(SCALARS, SCALARS, evaluated, SCALARS, SCALARS)
    assert [line["step"].partition("/")[0] for line in lines] == ["100000", "300000", "500000"]
    assert lines[1]["eval"] == "475"
    assert max(len(" ".join(map("=".join, line.items()))) for line in lines) <= 160


def test_what_is_not_measured_is_not_shown() -> None:
    assert set(plain_lines({})[0]) == {"step", "elapsed"}
    text = screen({})
    assert "300,000 / 1,000,000" in text and "waiting for the first update" in text
    for label in ("return", "production", "staleness", "discarded", "losses", "faults", "nan"):
        assert label not in text
    quiet = screen({"queue/discarded/stale": 0, "faults/actor_restarts": 0, "queue/ready": 0})
    assert "ready 0" in quiet and "discarded" not in quiet and "faults" not in quiet


def test_the_panel_says_all_that_was_measured() -> None:
    text = screen(SCALARS)
    for words in (
        "impala · ALE/Pong-v5",
        "runs/pong",
        "30%",
        "300,000 / 1,000,000",
        "left",
        "412.3",
        "183,001 steps/s",
        "182,410 steps/s",
        "actor works 90%, waits 10%",
        "learner works 40%, waits 60%",
        "production    the learner waits for samples",
        "mean 0.83   max 2   in flight 0.5   in queue 0.33",
        "ready 1   running 15",
        "stale 3",
        "learning rate 0.00025",
        "actor restarts 1",
    ):
        assert words in text, f"{words!r} is missing in\n{text}"


@pytest.mark.parametrize("width", [40, 60, 79, 80, 200])
def test_the_panel_fits_the_terminal_and_never_exceeds_80_columns(width: int) -> None:
    lines = screen(SCALARS, width).splitlines()
    assert {cell_len(line) for line in lines} == {min(width, 80)}


def test_a_value_stays_until_a_newer_one_comes_and_the_best_return_stays_for_good() -> None:
    console = RichConsole(file=Terminal(), width=80, height=40, color_system=None)
    live = LiveConsole("t", Progress(100), Path("r"), console)
    for step, value in ((1, 50.0), (2, 475.0), (3, math.nan), (4, 20.5)):
        live.update(step, {"charts/episodic_return": value, f"losses/at_{step}": step})
    live.close()
    with console.capture() as capture:
        console.print(live.render())
    text = capture.get()
    assert "20.5" in text and "best 475" in text and "at 1 1" in text and "▁█▁" in text


@pytest.mark.parametrize(
    ("actor", "learner", "limit"),
    [
        ((0.1, 0.9), (0.6, 0.4), "production"),
        ((0.6, 0.4), (0.1, 0.9), "consumption"),
        # Taking turns in one process nobody waits in a queue: the longer turn limits.
        ((0.0, 0.8), (0.0, 0.2), "production"),
        ((0.0, 0.2), (0.0, 0.8), "consumption"),
        ((0.0, 0.0), (0.1, 0.9), None),
    ],
)
def test_the_side_that_is_waited_for_limits_the_run(
    actor: tuple[float, float], learner: tuple[float, float], limit: str | None
) -> None:
    scalars = {
        "time/actor/wait": actor[0],
        "time/actor/work": actor[1],
        "time/learner/wait": learner[0],
        "time/learner/work": learner[1],
    }
    assert limiting_rate(scalars) == limit
    assert limiting_rate({}) is None and waiting_share("actor", {"time/actor/wait": 1.0}) is None


def test_the_remaining_time_of_a_resumed_run_counts_its_own_steps_only() -> None:
    progress = Progress(1_000_000)
    progress.update(900_000, {})
    assert progress.remaining_seconds is None  # nothing is known of the rate yet
    progress.update(900_001, {"perf/sps": 1e9})
    remaining = progress.remaining_seconds
    assert remaining is not None and remaining > 0
    progress.update(1_000_001, {})
    assert progress.remaining_seconds == 0


def test_a_time_limit_that_comes_first_is_what_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("unirl.report.console.time.monotonic", lambda: now[0])
    progress = Progress(1_000_000, max_seconds=100.0)
    progress.update(0, {"time/seconds": 30.0})  # of an earlier session
    now[0] += 20
    progress.update(2000, {"time/seconds": 50.0})  # at this rate 9,980 s for the steps
    assert progress.share == pytest.approx(0.5)
    assert progress.remaining_seconds == pytest.approx(50.0)
    now[0] += 10
    assert progress.remaining_seconds == pytest.approx(40.0)
    progress.update(900_000, {"time/seconds": 60.0})
    assert progress.share == pytest.approx(0.9)
    progress.update(900_001, {"time/seconds": 100.0})
    assert (progress.share, progress.remaining_seconds) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([3.0], ""), ([0, 7], "▁█"), ([5, 5], "▁▁"), (range(8), "▁▂▃▄▅▆▇█")],
)
def test_a_sparkline_spans_from_the_lowest_to_the_highest(values: list[float], line: str) -> None:
    assert sparkline(values, 8) == line


def test_a_sparkline_never_exceeds_its_cells() -> None:
    for number in range(2, 100):
        assert len(sparkline(range(number), 24)) == min(number, 24)


def run_on_a_terminal(term: str) -> str:
    """What arrives at a real pseudo-terminal."""
    process, descriptor = pty.fork()
    if process == 0:
        script = (
            "from pathlib import Path; from unirl.report.console import Progress, make_console\n"
            "c = make_console('t', Progress(10), Path('r')); c.update(5, {'perf/sps': 3.0})\n"
            "c.note('saved [step 5]'); c.close()"
        )
        os.execve(sys.executable, [sys.executable, "-c", script], os.environ | {"TERM": term})
    received = b""
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # the other side hung up
            break
        if not part:
            break
        received += part
    os.waitpid(process, 0)
    os.close(descriptor)
    return received.decode()


def test_a_terminal_gets_the_panel_and_its_cursor_back() -> None:
    received = run_on_a_terminal("xterm-256color")
    assert "╭" in received and "saved [step 5]" in received
    assert received.rindex("\x1b[?25h") > received.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_lines() -> None:
    received = run_on_a_terminal("dumb")
    assert "step=5/10" in received and "\x1b" not in received


def test_closing_twice_is_fine() -> None:
    for stream in (io.StringIO(), Terminal()):
        console: Console = make_console("t", Progress(10), Path("r"), stream)
        console.close()
        console.close()
