"""What carries slots and weights between the processes of a run. A runner chooses one; nobody else
names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from unirl.core.queue import REASONS, Event, QueueConfig, QueueServer
from unirl.core.sample import SampleSpec
from unirl.core.weights import Weights, WeightStore
from unirl.errors import LockHeld


class Cells(Protocol):
    """Zeroed 64-bit integers that all processes of a run see. One is read and written whole."""

    def view(self) -> memoryview:
        """The cells; in each process its own view of the same memory."""


class Transport(Protocol):
    """Makes what a plan needs to connect its producers with its learners."""

    def queue(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        *,
        shares: Sequence[float] = (1.0,),
        reasons: Sequence[str] = REASONS,
    ) -> QueueServer:
        """A queue. shares: one for each pool that feeds it, in proportion to what is learned."""

    def weights(self, example: Weights) -> WeightStore:
        """A weight store for weights of these names, shapes and dtypes."""

    def cells(self, number: int) -> Cells:
        """Memory for counters and turns."""

    def event(self) -> Event:
        """An event that any process of the run may set or wait for."""

    def end_lock_holders_by(self, end: Callable[[LockHeld], bool]) -> None:
        """How a process that has held a queue's lock for too long is ended; whether it was."""
