"""How much of a run is left: what schedules fall with.

Linear in samples is the usual rule. Linear in a budget, of samples or of seconds, is that of
"Budgeted Training" (Li, Yumer and Ramanan, ICLR 2020): whatever a machine gets done in its time,
the step size has reached zero at the end of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Horizon:
    """What schedules end at: samples, and seconds of training where they follow the clock too."""

    total_steps: int
    max_seconds: float | None = None


class Countdown:
    """Counts a learner towards its horizon. `seconds` are those of training, earlier sessions
    included.

    agree: where several processes learn together: from the seconds that passed here to those that
    all of them count.
    """

    def __init__(self, horizon: Horizon, agree: Callable[[float], float] | None = None) -> None:
        self.horizon, self._agree = horizon, agree
        self.seconds = 0.0
        self._ticked: float | None = None

    def tick(self) -> None:
        """Look at the clock: once per update, so that all of its steps have one size. The first
        time starts it.
        """
        now = time.monotonic()
        passed = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        # Counted in any case, as a resume may set a limit; asking the others costs a message.
        if self._agree is not None and self.horizon.max_seconds is not None:
            passed = self._agree(passed)
        self.seconds += passed

    def left(self, num_steps: int) -> float:
        """The share of the run that lies ahead after `num_steps` samples, from 1 to 0."""
        used = num_steps / self.horizon.total_steps
        if self.horizon.max_seconds is not None:
            used = max(used, self.seconds / self.horizon.max_seconds)
        return max(0.0, 1.0 - used)
