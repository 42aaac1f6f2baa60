"""The sample queue and its law: who may produce, in which order samples are learned, and how old
they may be.

The law: there are (max_staleness + 1) * batch_size places and no more. A place comes back only by
`release`, which the training loop calls after it published the newer weights. So whoever starts a
sample sees weights so new that, learned in order of start, the sample cannot be older than
`max_staleness` updates. `window` lets finished samples overtake slow ones; what got too old by that
is discarded by `take`, the only judge of age, and counted.

`core/slot_queue.py` keeps it, whatever memory the places lie in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from unirl.core.sample import Batch, Slot
from unirl.errors import UniRLError


@dataclass(frozen=True)
class QueueConfig:
    """How many samples may be under way, and in which order they are learned."""

    batch_size: int = 1
    """Slots per update. More: smoother gradients, fewer updates per sample."""
    max_staleness: int = 1
    """How many updates old a sample may be. 0: strictly on-policy, actors and learner take turns;
    more: they overlap.
    """
    window: int | None = 1
    """How far a finished slot may overtake slower ones. 1: order of start, nothing goes stale;
    none: whichever is ready first.
    """
    timeout_seconds: float = 300.0
    """How long the learner waits for one slot before it gives up, naming the actor it waited for.
    """

    def __post_init__(self) -> None:
        for name, minimum in (("batch_size", 1), ("max_staleness", 0), ("window", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UniRLError(
                    f"queue.{name} is {value}",
                    f"queue.{name} >= {minimum} must hold",
                    f"set it to {minimum} or more",
                )
        if self.timeout_seconds <= 0:
            raise UniRLError(
                f"queue.timeout_seconds is {self.timeout_seconds}",
                "a deadline must be > 0",
                "set it to 300, say",
            )

    @property
    def num_slots(self) -> int:
        """The places there are: at most this many samples are out."""
        return (self.max_staleness + 1) * self.batch_size


class SampleQueue(Protocol):
    """What actors, learners and runners see of a queue."""

    def acquire(self, timeout: float | None = None, *, actor: int = 0) -> Slot:
        """The right to produce one sample; blocks while every place is out (back-pressure)."""

    def commit(self, slot: Slot) -> None:
        """The slot is filled: acknowledged, it will be trained once or discarded with a counted
        reason.
        """

    def discard(self, slot: Slot, reason: str) -> None:
        """Give the place back without a sample; the reason is counted."""

    def reissue(self, slot: Slot) -> None:
        """Give the place back, but not the ticket: the next to acquire gets it."""

    def take(self, learner_version: int, timeout: float | None = None) -> Batch:
        """The next batch, none of it older than max_staleness."""

    def release(self, batch: Batch) -> None:
        """Give the batch's places back: call it after the newer weights were published."""

    def close(self) -> None:
        """Wake everyone up with QueueClosed; idempotent."""


class Cursor(NamedTuple):
    """Which tickets are still to be done by one who keeps no samples."""

    next_ticket: int
    """It, and all after it."""
    due: list[int]
    """Those before it, in order."""


class Snapshot(NamedTuple):
    """A queue at one moment."""

    ready: list[Slot]
    """Acknowledged samples, oldest ticket first."""
    unfinished: list[int]
    """Tickets that are running or due, in order."""
    next_ticket: int
    discarded: dict[str, int]
    """As `SlotQueue.discarded`."""

    @property
    def cursor(self) -> Cursor:
        """Where to go on without the ready samples: their tickets are due again."""
        waiting = [int(slot.ticket) for slot in self.ready]
        return Cursor(self.next_ticket, sorted([*self.unfinished, *waiting]))
