"""How much of a run is left: what schedules fall with.

Linear in samples is the usual rule. Linear in a budget, of samples or of seconds, is that of
"Budgeted Training" (Li, Yumer and Ramanan, ICLR 2020): whatever a machine gets done in its time,
the step size has reached zero at the end of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Horizon:
    """What schedules end at: samples, and seconds of training where they follow the clock too."""

    total_steps: int
    max_seconds: float | None = None


class Countdown:
    """Counts a learner towards its horizon.

    leading: where several processes learn together: a number as the one has it that ends the run.
    """

    def __init__(self, horizon: Horizon, leading: Callable[[float], float] | None = None) -> None:
        self.horizon, self._leading = horizon, leading
        self._seconds = 0.0

    def reach(self, seconds: float) -> None:
        """So much training time has passed. Once per update, so that all of its steps have one
        size; where several learn together, all of them call this.
        """
        if self.horizon.max_seconds is not None:
            self._seconds = seconds if self._leading is None else self._leading(seconds)

    def left(self, num_steps: int) -> float:
        """The share of the run that lies ahead after `num_steps` samples, from 1 to 0."""
        used = num_steps / self.horizon.total_steps
        if self.horizon.max_seconds is not None:
            used = max(used, self._seconds / self.horizon.max_seconds)
        return max(0.0, 1.0 - used)
