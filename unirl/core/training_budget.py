"""How much of a run is left: what schedules fall with.

Linear in samples is the usual rule. Linear in a budget, of samples or of seconds, is that of
"Budgeted Training" (Li, Yumer and Ramanan, ICLR 2020): whatever a machine gets done in its time,
the step size has reached zero at the end of it. Constant first and linear at the end is the
cooldown of Haegele et al. (arXiv 2405.18392, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingBudget:
    """What schedules end at: samples, and seconds of training where they follow the clock too."""

    total_steps: int
    max_seconds: float | None = None
    anneal_from: float = 0.0
    """The share of the run that is over when they begin to fall, below 1."""


class ScheduleProgress:
    """Counts a learner towards its budget.

    leading: where several processes learn together: a number as the one has it that ends the run.
    """

    def __init__(
        self, budget: TrainingBudget, leading: Callable[[float], float] | None = None
    ) -> None:
        self.budget, self._leading = budget, leading
        self._seconds = 0.0

    def record_training_seconds(self, seconds: float) -> None:
        """So much training time has passed. Once per update, so that all of its steps have one
        size; where several learn together, all of them call this.
        """
        if self.budget.max_seconds is not None:
            self._seconds = seconds if self._leading is None else self._leading(seconds)

    def left(self, num_steps: int) -> float:
        """What linear schedules have left after `num_steps` samples, from 1 to 0: the share of the
        run that is left, over that which is left when they begin to fall.
        """
        return min(1.0, (1.0 - self.done(num_steps)) / (1.0 - self.budget.anneal_from))

    def done(self, num_steps: int) -> float:
        """The share of the run that is over after `num_steps` samples, from 0 to 1."""
        used = num_steps / self.budget.total_steps
        if self.budget.max_seconds is not None:
            used = max(used, self._seconds / self.budget.max_seconds)
        return min(1.0, used)
