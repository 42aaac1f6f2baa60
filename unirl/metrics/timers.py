"""Where the time of an actor goes, lap by lap: cheap enough to run in every step.

    timers.start()
    pull_weights()
    timers.lap("weights")
    for t in range(length):
        act()
        timers.lap("inference")
        step()
        timers.lap("env")

An actor that has `timers` (a TimedActor) uses these three names. They tell host time: on a CUDA
device work is only launched in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Protocol, runtime_checkable


class Timers:
    """Totals by name. A lap is what came since the start or the previous lap, in one thread."""

    def __init__(self) -> None:
        self.counts_cpu = False
        """Also count CPU time: of this process with all its threads, but not its children. It takes
        microseconds a lap, so it is left to those who measure.
        """
        self._wall_ns: dict[str, int] = defaultdict(int)
        self._cpu_ns: dict[str, int] = defaultdict(int)
        self._wall_start_ns = self._cpu_start_ns = 0

    def start(self) -> None:
        if self.counts_cpu:
            self._cpu_start_ns = time.process_time_ns()
        self._wall_start_ns = time.perf_counter_ns()

    def lap(self, name: str) -> None:
        """Add the time since the start or the previous lap to this name; the next lap begins."""
        now = time.perf_counter_ns()
        self._wall_ns[name] += now - self._wall_start_ns
        if self.counts_cpu:
            cpu_now = time.process_time_ns()
            self._cpu_ns[name] += cpu_now - self._cpu_start_ns
            self._cpu_start_ns = cpu_now
            now = time.perf_counter_ns()  # without what asking took
        self._wall_start_ns = now

    def seconds(self, name: str) -> float:
        return self._wall_ns[name] / 1e9

    def cpu_seconds(self, name: str) -> float:
        """CPU seconds so far, of laps that counted them."""
        return self._cpu_ns[name] / 1e9

    def reset(self) -> None:
        """All totals are 0 again; a lap that has begun continues."""
        self._wall_ns.clear()
        self._cpu_ns.clear()


@runtime_checkable
class TimedActor(Protocol):
    """An actor that keeps timers."""

    timers: Timers
