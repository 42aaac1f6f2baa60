"""The sample queue: who may produce, in which order samples are learned, and how old they may be.

The staleness bound: there are (max_staleness + 1) * batch_size slots and no more. A slot comes back
only by `release`, which the training loop calls after it published the newer weights. So a producer
that starts a sample sees weights so new that, learned in order of start, the sample cannot be older
than `max_staleness` updates. `window` lets finished samples overtake slow ones; what got too old by
that is discarded by `take`, the only judge of age, and counted.

The life of a slot:

    FREE --acquire--> RUNNING --commit--> READY --take--> TAKEN --release--> FREE
                         |--discard (a counted reason)----------------------> FREE
                         '--reissue--> DUE (the same ticket) --acquire--> RUNNING

Producers are members: they join and leave while the queue lives, and each acquired slot is a lease
with a number of its own. When a member is revoked (it died, or is thought dead), its leases end; a
commit that still comes with one of them is refused and counted.

    client = server.join()                       batch = server.take(version)
    slot = client.acquire()                      ...                        # learn, publish
    ...                                          server.release(batch)
    client.commit(slot)

`unirl.transports` implements both sides over one table, in plain or in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from unirl.config.rules import check_at_least, check_positive
from unirl.core.sample import Batch, Slot, Write

REASONS = (
    "stale",
    "actor_died",
    "actor_failed",
    "timeout",
    "filtered",
    "zero_variance",
    "aborted",
    "shutdown",
)
"""Why a slot was discarded. A recipe may declare more."""


@dataclass(frozen=True)
class QueueConfig:
    """How many samples may be in flight, and in which order they are learned."""

    batch_size: int = field(default=1, metadata={"common": True})
    """Slots per update. More: smoother gradients, fewer updates per sample."""
    max_staleness: int = field(default=1, metadata={"common": True})
    """How many updates old a sample may be. 0: strictly on-policy, actors and learner take turns;
    more: they overlap.
    """
    window: int | None = 1
    """How far a finished slot may overtake slower ones. 1: order of start, nothing goes stale;
    none: whichever is finished first.
    """
    timeout_seconds: float = 300.0
    """How long the learner waits for one slot before it gives up, naming the actor it waited for.
    """

    def __post_init__(self) -> None:
        check_at_least(1, "queue", self, "batch_size", "window")
        check_at_least(0, "queue", self, "max_staleness")
        check_positive("queue.timeout_seconds", self.timeout_seconds, "set it to 300, say")

    @property
    def num_slots(self) -> int:
        """The capacity: at most this many samples are out."""
        return (self.max_staleness + 1) * self.batch_size


class Event(Protocol):
    """Wakes processes or threads that wait; stays set until a wait clears it."""

    def set(self) -> None:
        """Wake who waits, now or when it next waits."""

    def wait(self, seconds: float) -> None:
        """Sleep until it is set, at most `seconds`, and clear it; may return early."""

    def fileno(self) -> int:
        """A descriptor that is readable while the event is set."""


class SlotBuffers(Protocol):
    """The memory of a queue's slots, for processes that help its members to fill them."""

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""

    def buffer(self, index: int) -> Mapping[str, Any]:
        """The tree of one slot."""


class QueueClient(Protocol):
    """What one producer sees of the queue."""

    @property
    def member(self) -> int:
        """The number that it joined with."""

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""

    def acquire(self, timeout: float | None = None) -> Slot:
        """The right to produce one sample; blocks while no slot is free (back-pressure).

        Raises DeadlineExceeded after `timeout` seconds, QueueClosed when the run is over,
        LeaseExpired when this member was revoked.
        """

    def try_acquire(self, *, is_fair: bool = False) -> Slot | None:
        """As acquire, without waiting. None: no slot is free, and `wait` ends when one may be.

        is_fair: None, too, for a member that holds its even part of all slots: others have theirs.
        """

    def wait(self, seconds: float, *others: Event) -> None:
        """Sleep until a slot may be free or another event is set, at most `seconds`."""

    def fileno(self) -> int:
        """A descriptor that is readable when a slot may be free."""

    def commit(self, slot: Slot) -> None:
        """The slot is filled: acknowledged, it is learned once or discarded with a counted reason.

        Raises LeaseExpired when the slot was revoked meanwhile: the sample is dropped and counted.
        """

    def discard(self, slot: Slot, reason: str) -> None:
        """Give the slot back without a sample; the reason is counted."""

    def reissue(self, slot: Slot) -> None:
        """Give the slot back, but not the ticket: the next to acquire gets it."""

    def save(self, slot: Slot, write: Write | None) -> None:
        """Keep what `write` puts into the slot: should the ticket be issued again, the next holder
        finds it there. None: what was saved is no longer valid, as the slot is written to.
        """

    def progress(self) -> None:
        """A sign of life of this member."""

    def leave(self) -> None:
        """Join no longer; what it still holds is discarded as `shutdown`."""


class Ticket(NamedTuple):
    """A sample that is to be produced: its id, its pool, and its number within the pool."""

    number: int
    pool: int
    pool_ticket: int


class Cursor(NamedTuple):
    """Which tickets are still to be done where no samples are kept."""

    next_ticket: int
    """It, and all after it."""
    due: list[Ticket]
    """Those before it, in order."""
    issued: list[int]
    """How many tickets each pool has had."""


class Snapshot(NamedTuple):
    """A queue at one moment."""

    ready: list[Slot]
    """Acknowledged samples, oldest ticket first."""
    unfinished: list[Ticket]
    """Tickets that are running or due, in order."""
    next_ticket: int
    issued: list[int]
    """How many tickets each pool has had."""
    discarded: dict[str, int]
    """By reason, since the queue was made."""

    @property
    def cursor(self) -> Cursor:
        """Where to continue without the ready samples: their tickets are due again."""
        waiting = [Ticket(slot.ticket, slot.pool, slot.pool_ticket) for slot in self.ready]
        return Cursor(self.next_ticket, sorted([*self.unfinished, *waiting]), self.issued)


@dataclass(frozen=True)
class MemberStatus:
    """One producer as the learner's process sees it."""

    member: int
    pool: int
    num_running: int
    """Slots that it holds."""
    idle_seconds: float
    """Since its last sign of life: an acquire, a commit, a discard, progress."""


@dataclass(frozen=True)
class PoolCounts:
    """What one pool has produced."""

    issued: int
    """Tickets that it was given."""
    discarded: int
    learned: int


@dataclass(frozen=True)
class QueueStats:
    """What the queue counted. Each number is of its own moment, but started = learned + discarded +
    out holds whenever nobody is in the middle of a call.
    """

    states: Mapping[str, int]
    """Slots by state: free, running, ready, taken, due."""
    started: int
    committed: int
    learned: int
    discarded: Mapping[str, int]
    """By reason."""
    late: int
    """Calls that came with an expired lease and were refused."""
    pools: Sequence[PoolCounts] = field(default=())

    @property
    def out(self) -> int:
        """Slots that hold a ticket."""
        return sum(self.states.values()) - self.states["free"]


class QueueServer(Protocol):
    """What the learner's process sees of the queue."""

    @property
    def config(self) -> QueueConfig:
        """What the queue was made with."""

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""

    def join(self, pool: int = 0, name: str = "") -> QueueClient:
        """A new member of a pool; its client may be sent to another process where the transport
        reaches one. name: what messages call it, "actor 3".
        """

    def revoke(self, member: int, reason: str = "actor_died", *, reissue: bool = False) -> int:
        """End a member and its leases, so that its slots are issued again; returns how many it had.

        reissue: their tickets too, then nothing is discarded.
        """

    def retire(self, member: int) -> None:
        """Lend it nothing more: it finishes what it holds, and its next acquire is LeaseExpired."""

    def members(self) -> list[MemberStatus]:
        """Those that joined and have not left."""

    def buffers(self) -> SlotBuffers:
        """The slots' memory, which may be sent where a client may."""

    def take(self, learner_version: int, timeout: float | None = None) -> Batch:
        """The next batch, none of it older than max_staleness. Raises DeadlineExceeded,
        QueueClosed.

        What a deadline interrupted is in the next call's batch.
        """

    def release(self, batch: Batch) -> None:
        """Give the batch's slots back: call it after the newer weights were published."""

    def next_pool(self) -> int | None:
        """The pool whose member can acquire the next slot; None when none is free."""

    def ages(self, learner_version: int) -> tuple[list[int], list[int]]:
        """Ages in updates of the running slots (since their start) and of the ready ones."""

    def stats(self) -> QueueStats:
        """Slots by state, and what was counted so far."""

    def describe(self) -> str:
        """One sentence on who holds the slots: the end of every deadline's message."""

    def snapshot(self) -> Snapshot:
        """What a checkpoint must know, as of one moment."""

    def restore(
        self,
        ready: Sequence[Slot],
        next_ticket: int,
        version: int = 0,
        *,
        due: Sequence[Ticket] = (),
        issued: Sequence[int] | None = None,
    ) -> None:
        """Continue with the samples and tickets of an earlier queue, before anyone acquires."""

    def close(self) -> None:
        """Wake all that wait, with QueueClosed; idempotent."""
