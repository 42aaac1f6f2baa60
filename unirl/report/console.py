"""The console: how far a run is, how well it does, which rate limits it; a live panel or lines."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns of the live panel; a narrower terminal gets a narrower panel."""

LINE_SECONDS = 10.0
"""Between two lines where there is no terminal; every row is in metrics.jsonl."""

_RETURN, _LENGTH = "charts/episodic_return", "charts/episodic_length"
_EVALUATION = "eval/return_mean"
_BLOCKS = "▁▂▃▄▅▆▇█"


class Console(Protocol):
    """What a run shows while it trains."""

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show one log interval; `step` counts consumed environment steps."""

    def note(self, text: str) -> None:
        """Show a sentence: a checkpoint written, an actor restarted."""

    def close(self) -> None:
        """Leave the last state on the screen, and the terminal as it was."""


def make_console(
    title: str,
    progress: Progress,
    run_dir: Path,
    stream: TextIO | None = None,
) -> Console:
    """A live panel when `stream` (stdout) is a terminal, else a greppable line now and then."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(title, progress, run_dir, RichConsole(file=stream))
    return PlainConsole(title, progress, run_dir, partial(print, file=stream, flush=True))


@dataclass
class Progress:
    """Steps, time, and the returns so far."""

    total_steps: int
    """Where the run ends; 0 when it has no end."""
    max_seconds: float | None = None
    """Training time after which it ends as well."""
    step: int = field(default=0, init=False)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=240), init=False)
    """The newest returns, one per log interval with finished episodes."""
    best: float = field(default=-math.inf, init=False)
    _start_time: float = field(default_factory=time.monotonic, init=False)
    _first: tuple[int, float] | None = field(default=None, init=False)
    """Step and time of the first update: a resumed run does not begin at step 0."""
    _steps_per_second: float = field(default=0.0, init=False)
    _update_time: float = field(default=0.0, init=False)
    _trained_seconds: float = field(default=0.0, init=False)
    """Training time at the last update, earlier sessions included."""

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
            self._steps_per_second = scalars.get("perf/sps", 0.0)
        elif step > self._first[0]:
            self._steps_per_second = (step - self._first[0]) / max(now - self._first[1], 1e-9)
        self.step, self._update_time = step, now
        self._trained_seconds = scalars.get("time/seconds", 0.0)
        value = scalars.get(_RETURN, math.nan)
        if math.isfinite(value):
            self.returns.append(value)
            self.best = max(self.best, value)

    @property
    def seconds(self) -> float:
        """Since the console was made."""
        return time.monotonic() - self._start_time

    @property
    def share(self) -> float:
        """How much of the run is over, from 0 to 1: by steps or by time, whichever is more."""
        share = self.step / self.total_steps if self.total_steps > 0 else 0.0
        if self.max_seconds is not None:
            share = max(share, self._trained_seconds / self.max_seconds)
        return min(1.0, share)

    @property
    def remaining_seconds(self) -> float | None:
        """At the mean rate since the first update; None while it is unknown."""
        if not self._steps_per_second > 0 or self.total_steps <= 0:
            return None
        seconds = max(0, self.total_steps - self.step) / self._steps_per_second
        if self.max_seconds is not None:
            seconds = min(seconds, self.max_seconds - self._trained_seconds)
        return max(0.0, seconds - (time.monotonic() - self._update_time))


def waiting_share(side: str, scalars: Mapping[str, float]) -> float | None:
    """The share of its time that `side` (actor, learner) waited for the other; None: unknown."""
    wait, work = (scalars.get(f"time/{side}/{kind}") for kind in ("wait", "work"))
    if wait is None or work is None or not wait + work > 0:
        return None
    return wait / (wait + work)


def limiting_rate(scalars: Mapping[str, float]) -> str | None:
    """Which rate holds the other up: "production" (the learner waits more) or "consumption".

    When both wait alike, as they do taking turns, it is the one that works longer. None: unknown.
    """
    actor, learner = waiting_share("actor", scalars), waiting_share("learner", scalars)
    if actor is None or learner is None:
        return None
    if abs(actor - learner) > 0.05:
        return "production" if learner > actor else "consumption"
    works_longer = scalars["time/actor/work"] > scalars["time/learner/work"]
    return "production" if works_longer else "consumption"


class PlainConsole:
    """A line of key=value pairs every LINE_SECONDS, for logs, pipes and grep: what matters most.
    Evaluations are never left out, nor is the last interval. say: where each line goes.
    """

    def __init__(
        self, title: str, progress: Progress, run_dir: Path, say: Callable[[str], None]
    ) -> None:
        self._progress, self.note = progress, say
        self._next_time = -math.inf
        self._unsaid: Mapping[str, float] | None = None
        self.note(f"{title} -> {run_dir}")

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        self._progress.update(step, scalars)
        self._unsaid = scalars
        now = time.monotonic()
        if now >= self._next_time or _EVALUATION in scalars:
            self._next_time = now + LINE_SECONDS
            self._say()

    def close(self) -> None:
        self._say()

    def _say(self) -> None:
        scalars, self._unsaid = self._unsaid, None
        if scalars is not None:
            pairs = _pairs(self._progress, scalars)
            self.note(" ".join(f"{name}={value}" for name, value in pairs if value is not None))


def _pairs(progress: Progress, scalars: Mapping[str, float]) -> Iterable[tuple[str, str | None]]:
    def value(name: str) -> str | None:
        return _short(scalars[name]) if name in scalars else None

    total, remaining = progress.total_steps, progress.remaining_seconds
    yield "step", f"{progress.step}/{total}" if total > 0 else str(progress.step)
    yield "reward", value("reward")
    yield "return", value(_RETURN)
    yield "best", _short(progress.best) if progress.returns else None
    yield "eval", value(_EVALUATION)
    yield "sps", _rate(scalars.get("perf/sps"))
    yield "limited_by", limiting_rate(scalars)
    discarded = sum(v for name, v in scalars.items() if name.startswith("queue/discarded/"))
    yield "discarded", _short(discarded) if discarded else None
    yield "restarts", value("faults/actor_restarts")
    yield "elapsed", _clock(progress.seconds)
    yield "left", None if remaining is None else _clock(remaining)


class LiveConsole:
    """A panel redrawn in place twice a second; notes and stray prints scroll by above it."""

    def __init__(self, title: str, progress: Progress, run_dir: Path, console: RichConsole) -> None:
        self._title, self._run_dir, self._progress = title, run_dir, progress
        self._scalars: dict[str, float] = {}
        self._console = console
        self._live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=2,
            redirect_stdout=console.file is sys.stdout,
        )
        self._live.start(refresh=True)

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take in one log interval; values it does not name keep standing."""
        self._progress.update(step, scalars)
        self._scalars = {**self._scalars, **scalars}

    def note(self, text: str) -> None:
        self._console.print(Text("  " + text, style="dim"))

    def close(self) -> None:
        """Draw a last time and give the terminal back; twice is as good as once."""
        self._live.stop()

    def render(self) -> RenderableType:
        scalars = self._scalars
        rows: list[tuple[str, RenderableType | None]] = [
            ("return", _return_row(self._progress, scalars)),
            ("evaluation", _facts(scalars, "eval/")),
            ("production", _rate_row(scalars, "perf/produced_sps", "actor")),
            ("consumption", _rate_row(scalars, "perf/sps", "learner")),
            ("limited by", _limit_row(scalars)),
            ("staleness", _facts(scalars, "staleness/", ("mean", "max", "in_flight", "in_queue"))),
            ("queue", _facts(scalars, "queue/", ("ready", "running"))),
            ("discarded", _facts(scalars, "queue/discarded/", warn=True)),
            ("losses", _facts(scalars, "losses/")),
            ("faults", _facts(scalars, "faults/", warn=True)),
        ]
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True, min_width=11)
        table.add_column()
        for label, content in rows:
            if content is not None:  # what is not measured is not shown
                table.add_row(label, content)
        waiting = Text("waiting for the first update", style="dim")
        return Panel(
            Group(_progress_row(self._progress), Text(), table if table.row_count else waiting),
            title=f"[bold]{escape(self._title)}[/]",
            title_align="left",
            subtitle=f"[dim]{escape(str(self._run_dir))}[/]",
            subtitle_align="right",
            border_style="cyan",
            width=min(WIDTH, self._console.width),
        )


def _progress_row(progress: Progress) -> RenderableType:
    elapsed, remaining = _clock(progress.seconds), progress.remaining_seconds
    if progress.total_steps <= 0:
        return Text(f"{progress.step:,} steps   {elapsed}")
    share = progress.share
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(ratio=1)
    for _ in range(3):
        grid.add_column(no_wrap=True, justify="right")
    grid.add_row(
        ProgressBar(total=1.0, completed=share, complete_style="cyan", finished_style="green"),
        Text(f"{math.floor(share * 100)}%", style="bold"),
        Text(f"{progress.step:,} / {progress.total_steps:,}"),
        Text(elapsed if remaining is None else f"{elapsed}, {_clock(remaining)} left"),
    )
    return grid


def _return_row(progress: Progress, scalars: Mapping[str, float]) -> Text | None:
    if not progress.returns:
        return None
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{_short(progress.returns[-1]):<8}", style="bold green")
    text.append("best ", style="dim").append(f"{_short(progress.best):<8}")
    if _LENGTH in scalars:
        text.append("length ", style="dim").append(f"{_short(scalars[_LENGTH]):<8}")
    return text.append(sparkline(progress.returns, 24), style="green")


def _rate_row(scalars: Mapping[str, float], name: str, side: str) -> Text | None:
    rate, wait = _rate(scalars.get(name), ","), waiting_share(side, scalars)
    if rate is None and wait is None:
        return None
    text = Text(no_wrap=True, overflow="ellipsis")
    if rate is not None:
        text.append(f"{rate:>7}", style="bold").append(" steps/s   ", style="dim")
    if wait is not None:
        num_cells = round(12 * (1 - wait))
        text.append("━" * num_cells, style="cyan")
        text.append("─" * (12 - num_cells), style="bright_black")
        text.append(f"  {side} works {1 - wait:.0%}, waits {wait:.0%}", style="dim")
    return text


def _limit_row(scalars: Mapping[str, float]) -> Text | None:
    limit = limiting_rate(scalars)
    if limit is None:
        return None
    waits = "the learner waits for samples" if limit == "production" else "actors wait for slots"
    return Text().append(f"{limit:<14}", style="bold yellow").append(waits, style="dim")


def _facts(
    scalars: Mapping[str, float],
    prefix: str,
    names: Iterable[str] | None = None,
    warn: bool = False,
) -> Columns | None:
    """Name and value of the scalars under a prefix; of warnings only those that are not 0."""
    if names is None:
        names = sorted(name.removeprefix(prefix) for name in scalars if name.startswith(prefix))
    facts = []
    for name in names:
        value = scalars.get(prefix + name)
        if value is not None and not (warn and value == 0):
            style = "bold red" if warn or not math.isfinite(value) else ""
            fact = Text(name.replace("_", " ") + " ", style="dim", no_wrap=True)
            facts.append(fact.append(_short(value), style=f"not dim {style}"))
    return Columns(facts, padding=(0, 3)) if facts else None


def sparkline(values: Iterable[float], num_cells: int) -> str:
    """The values as blocks between their lowest and highest; means where cells are fewer."""
    series = list(values)
    if len(series) < 2:
        return ""
    size = max(1.0, len(series) / num_cells)
    cells = []
    for index in range(min(num_cells, len(series))):
        some = series[int(index * size) : max(int(index * size) + 1, int((index + 1) * size))]
        cells.append(sum(some) / len(some))
    low, high = min(cells), max(cells)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((cell - low) * scale)] for cell in cells)


def _short(value: float) -> str:
    """A number in few characters that still tell it apart: 475, 0.0123, -3.1e-05."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.1f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def _rate(value: float | None, group: str = "") -> str | None:
    return None if value is None or not math.isfinite(value) else f"{value:{group}.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
