"""One window of time, warm-up excluded: what was done in it, and how much CPU that took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from unirl.bench import usage


@dataclass(frozen=True)
class Mark:
    """One moment."""

    seconds: float
    """Of the monotonic clock."""
    cpu_seconds: float
    """Of this process and its descendants."""
    num_steps: int
    machine_cpu_seconds: float | None
    """Of everything on this machine, where that is known."""


class Stopwatch:
    """Ticks after each piece of work; the window lies between two ticks, so no piece is cut.

    It begins with the first tick that comes `warm_up_seconds` after the very first one, and ends
    with the first that comes `seconds` later. on_begin is called when it begins.
    """

    def __init__(
        self, seconds: float, warm_up_seconds: float, on_begin: Callable[[], None]
    ) -> None:
        self._seconds, self._warm_up_seconds, self._on_begin = seconds, warm_up_seconds, on_begin
        self._first_seconds: float | None = None
        self.start: Mark | None = None
        self.end: Mark | None = None

    def tick(self, num_steps: int) -> bool:
        """num_steps: done so far. True: the window is over."""
        now = time.monotonic()
        if self._first_seconds is None:
            self._first_seconds = now
        elif self.start is None:
            if now - self._first_seconds >= self._warm_up_seconds:
                self._on_begin()
                self.start = _mark(num_steps)
        elif self.end is None and now - self.start.seconds >= self._seconds:
            self.end = _mark(num_steps)
        return self.end is not None

    def figures(self) -> dict[str, float]:
        """Steps, seconds, and what follows from them; empty before the window is over."""
        if self.start is None or self.end is None:
            return {}
        seconds = self.end.seconds - self.start.seconds
        num_steps = self.end.num_steps - self.start.num_steps
        cpu_seconds = self.end.cpu_seconds - self.start.cpu_seconds
        before, after = self.start.machine_cpu_seconds, self.end.machine_cpu_seconds
        others = 0.0 if before is None or after is None else after - before - cpu_seconds
        return {
            "env_steps": num_steps,
            "seconds": seconds,
            "env_steps_per_second": num_steps / seconds,
            "core_us_per_env_step": 1e6 * cpu_seconds / max(num_steps, 1),
            "cores_used": cpu_seconds / seconds,
            "cores_used_by_others": max(0.0, others / seconds),
        }


def _mark(num_steps: int) -> Mark:
    cpu_seconds = usage.tree_cpu_seconds(os.getpid())
    return Mark(time.monotonic(), cpu_seconds, num_steps, usage.machine_cpu_seconds())
