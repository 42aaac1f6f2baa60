"""What starts the runs of a sweep: processes of this machine, or of a cluster's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unirl.sweep.trial import SeedRun, Trial


@dataclass(frozen=True)
class End:
    """How a run's process ended."""

    failure: str = ""
    """Why, in a line; empty: in good order."""
    is_lost: bool = False
    """It did not end by itself: the machine that it was on is gone."""


class Training(Protocol):
    """A run that trains."""

    @property
    def trial(self) -> Trial: ...

    @property
    def run(self) -> SeedRun: ...

    def poll(self) -> End | None:
        """How it ended; None while it trains."""

    def stop(self) -> None:
        """Ctrl-C: once for a checkpoint, twice for an end at once."""

    def wait(self) -> None:
        """Until it has ended."""


class Launcher(Protocol):
    """Where runs are started. Its owner closes it when nothing trains any more."""

    def describe(self) -> str:
        """How many train at a time, in words."""

    def has_room(self, running: Sequence[Training]) -> bool:
        """Whether one more may train beside these. Raises UniRLError where none ever may."""

    def start(self, trial: Trial, run: SeedRun, pause_steps: int | None) -> Training:
        """Begin a run, or continue it; there is room. pause_steps: where it is to end early."""

    def close(self) -> None:
        """Idempotent."""
