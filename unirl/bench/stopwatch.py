"""One window of time, warm-up excluded: what was done in it, and how much CPU that took."""

from __future__ import annotations

import operator
import os
import time
from typing import NamedTuple

from unirl.bench import usage
from unirl.bench.stages import Figures, rates


class Spent(NamedTuple):
    """What was done and used between two moments; at one moment, since whatever each counts from.

    seconds: of the monotonic clock. CPU seconds: of this process with its descendants, of this
    process alone, and of everything on this machine where that is known (else 0).
    """

    num_steps: int
    seconds: float
    cpu_seconds: float
    own_cpu_seconds: float
    machine_cpu_seconds: float

    def since(self, start: Spent) -> Spent:
        differences = map(operator.sub, self[1:], start[1:])
        return Spent(self.num_steps - start.num_steps, *differences)


class Stopwatch:
    """Ticks after each piece of work; the window is between two ticks, so no piece is cut.

    It begins with the first tick that comes after the warm-up (a quarter of `seconds`, at most 3 s,
    from the first tick on), and ends with the first that comes `seconds` later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._first_seconds: float | None = None
        self._start: Spent | None = None
        self.window: Spent | None = None
        """None before it is over."""

    @property
    def has_begun(self) -> bool:
        return self._start is not None

    def tick(self, num_steps: int) -> bool:
        """num_steps: done so far. True: the window is over."""
        now = time.monotonic()
        if self._first_seconds is None:
            self._first_seconds = now
        elif self._start is None:
            if now - self._first_seconds >= min(3.0, self._seconds / 4):
                self._start = _now(num_steps)
        elif self.window is None and now - self._start.seconds >= self._seconds:
            self.window = _now(num_steps).since(self._start)
        return self.window is not None

    def figures(self) -> Figures:
        """Steps, seconds, and what follows from them, once the window is over."""
        assert self.window is not None
        steps, seconds, cpu_seconds, _, machine = self.window
        others = max(0.0, (machine - cpu_seconds) / seconds)
        return {**rates(steps, seconds, cpu_seconds), "cores_used_by_others": others}


def _now(num_steps: int) -> Spent:
    return Spent(
        num_steps,
        time.monotonic(),
        usage.tree_cpu_seconds(os.getpid()),
        time.process_time(),
        usage.machine_cpu_seconds() or 0.0,
    )
