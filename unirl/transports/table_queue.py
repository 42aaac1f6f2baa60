"""The sample queue over one table of slots, whatever memory the table is in.

Every call that changes the table holds its lock, for microseconds. A process may be killed in any
of them: the kernel frees the lock, and `revoke` (the server's) finds what was left half done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from unirl.core.queue import Event, QueueConfig
from unirl.core.sample import Slot, Write
from unirl.errors import DeadlineExceeded, LeaseExpired, QueueClosed, UniRLError
from unirl.host import micros
from unirl.transports import slot_table as at
from unirl.transports.events import FdEvent, wait_any, wait_until
from unirl.transports.slot_table import SlotTable


class QueueMemory(Protocol):
    """What a queue is made of; the same for its server and all its clients."""

    @property
    def config(self) -> QueueConfig: ...
    @property
    def shares(self) -> Sequence[float]: ...
    @property
    def reasons(self) -> Sequence[str]: ...
    @property
    def cells(self) -> memoryview:
        """Of the SlotTable."""

    @property
    def slots(self) -> Sequence[Mapping[str, Any]]:
        """The data tree of each slot."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while the table is changed."""

    @property
    def learner_event(self) -> FdEvent:
        """Set when there may be something to take."""

    @property
    def pool_events(self) -> Sequence[FdEvent]:
        """One for each pool, set when its members may acquire."""

    @property
    def spin_seconds(self) -> float:
        """How long to look again and again before sleeping: 0 among threads, where one that spins
        holds up the one it waits for.
        """

    @property
    def write_events(self) -> MutableMapping[int, Any]:
        """CUDA events of slots that a device still writes; only within one process."""


class TableQueue:
    """What client and server have in common. See SlotBuffers."""

    def __init__(self, memory: QueueMemory) -> None:
        self.memory = memory
        self._lock = memory.lock
        self._table = SlotTable(memory.cells, len(memory.slots), memory.shares, memory.reasons)

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TableQueue.__init__(self, state["memory"])

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return bool(self._table.cells[at.CLOSED])

    def buffer(self, index: int) -> Mapping[str, Any]:
        """The tree of one slot."""
        return self.memory.slots[index]

    def _raise_if_closed(self) -> None:
        if self.closed:
            raise QueueClosed

    def _notify_producers(self) -> None:
        for event in self.memory.pool_events:
            event.set()

    def _require(self, slot: Slot, state: int) -> int:
        """The row of a slot that is held by this very lease, in this state."""
        cells, row = self._table.cells, self._table.rows[slot.index]
        if cells[row + at.LEASE] != slot.lease:
            cells[at.LATE] += 1
            raise LeaseExpired(
                f"slot {slot.index} of ticket {slot.ticket} comes with lease {slot.lease}",
                f"it was revoked: the slot's lease is {cells[row + at.LEASE]} now",
                "nothing is lost, the ticket was discarded or issued again",
            )
        if cells[row + at.STATE] != state:
            raise UniRLError(
                f"slot {slot.index} of ticket {slot.ticket} is not {at.STATE_NAMES[state]}",
                f"it is {at.STATE_NAMES[cells[row + at.STATE]]}",
                "a slot is committed or discarded exactly once, and released exactly once",
            )
        return row

    def _discard(self, index: int, reason: str) -> None:
        """Free a slot and count why."""
        table, row = self._table, self._table.rows[index]
        if reason not in table.reasons:
            raise UniRLError(
                f"discard reason {reason!r} is unknown",
                f"declared are {', '.join(table.reasons)}",
                "declare it in the plan",
            )
        # Freed before it is counted: what a kill in between leaves uncounted, `revoke` finds.
        table.cells[row + at.STATE] = at.FREE
        table.count_discards(reason)
        table.cells[table.pools[table.cells[row + at.POOL]] + at.DISCARDED] += 1


class TableClient(TableQueue):
    """See QueueClient. One producer; picklable where its memory is."""

    def __init__(self, memory: QueueMemory, member: int, pool: int) -> None:
        super().__init__(memory)
        self._attach(member, pool)

    def _attach(self, member: int, pool: int) -> None:
        self._member, self._pool = member, pool
        self._event = self.memory.pool_events[pool]
        self._seen = self._table.member_row(member) + at.SEEN_US
        self._was_notified = self._has_part = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "member": self._member, "pool": self._pool}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach(state["member"], state["pool"])

    @property
    def member(self) -> int:
        """The number that it joined with."""
        return self._member

    @property
    def pool(self) -> int:
        """The number of its pool."""
        return self._pool

    def acquire(self, timeout: float | None = None) -> Slot:
        started = time.monotonic()
        slot = self._look()
        if slot is None:
            slot = wait_until(
                self._look,
                self.may_acquire,
                self._event,
                timeout=timeout,
                spin_seconds=self.memory.spin_seconds,
            )
            if slot is None:
                raise DeadlineExceeded(
                    f"member {self._member} waited {timeout:g} s for a free slot",
                    self._table.describe({}),
                    "look at the log of the process that holds them, or raise the deadline",
                )
            self._pass_on()
            slot.wait_seconds = time.monotonic() - started
        return slot

    def try_acquire(self, *, is_fair: bool = False) -> Slot | None:
        had_part, self._has_part = self._has_part, False
        if is_fair and self._table.has_its_part(self._member, self._pool):
            slot, self._has_part = None, True
            if not had_part:  # what woke this one is for others
                self._pass_on()
        else:
            slot = self._look()
        if slot is None:
            self._was_notified = False
        elif self._was_notified:
            self._pass_on()
        return slot

    def wait(self, seconds: float, *others: Event) -> None:
        self._raise_if_closed()
        if wait_any(self._event, others, seconds):
            self._was_notified = True

    def fileno(self) -> int:
        return self._event.fileno()

    def commit(self, slot: Slot) -> None:
        if slot.first_version < 0 or slot.last_version < slot.first_version:
            raise UniRLError(
                f"slot of ticket {slot.ticket} was committed with versions "
                f"{slot.first_version}..{slot.last_version}",
                "0 <= first_version <= last_version must hold",
                "the actor sets both to the version that WeightStore.pull returned",
            )
        cells = self._table.cells
        wait_us, work_us = int(slot.wait_seconds * 1e6), int(slot.work_seconds * 1e6)
        with self._lock:
            row = self._require(slot, at.RUNNING)
            if slot.write_event is not None:
                self.memory.write_events[slot.index] = slot.write_event
            cells[row + at.FIRST], cells[row + at.LAST] = slot.first_version, slot.last_version
            cells[row + at.USED] = -1 if slot.used is None else slot.used
            cells[row + at.WAIT_US], cells[row + at.WORK_US] = wait_us, work_us
            cells[row + at.STATE] = at.READY
            cells[at.COMMITTED] += 1
            cells[self._seen] = micros()
        self.memory.learner_event.set()

    def discard(self, slot: Slot, reason: str) -> None:
        """See QueueClient. Raises UniRLError for a reason that was not declared."""
        with self._lock:
            self._require(slot, at.RUNNING)
            self._discard(slot.index, reason)
        self._notify_all()

    def reissue(self, slot: Slot) -> None:
        """See QueueClient: where tickets name something that must not be lost, such as a prompt."""
        with self._lock:
            self._table.cells[self._require(slot, at.RUNNING) + at.STATE] = at.DUE
        self._notify_all()

    def save(self, slot: Slot, write: Write | None) -> None:
        self.mark_saved(slot, None)  # killed while it writes, nobody shall read half of it
        if write is not None:
            slot.used = write()
            self.mark_saved(slot, -1 if slot.used is None else slot.used)

    def mark_saved(self, slot: Slot, used: int | None) -> None:
        """So much of the slot's data (-1: all) is what was saved; None: nothing."""
        with self._lock:
            row = self._require(slot, at.RUNNING)
            self._table.cells[row + at.SAVED] = 0 if used is None else used + 2
        slot.is_saved = used is not None

    def progress(self) -> None:
        if self._table.is_member(self._member):
            self._table.cells[self._seen] = micros()

    def leave(self) -> None:
        with self._lock:
            if not self._table.is_member(self._member):
                return
            for index in self._table.held_by(self._member):
                self._table.cells[self._table.rows[index] + at.LEASE] = 0
                self._discard(index, "shutdown")
            self._table.cells[self._table.member_row(self._member) + at.NUMBER] = 0
        self._notify_all()

    def _notify_all(self) -> None:
        """A slot was given back. The learner too: strict order may have waited for exactly it."""
        self.progress()
        self._notify_producers()
        self.memory.learner_event.set()

    def _pass_on(self) -> None:
        """One event serves all members of a pool: the one that it woke wakes the next, as long as
        there is something to acquire.
        """
        if self.may_acquire():
            self._event.set()

    def may_acquire(self) -> bool:
        """Whether asking for a slot is worth the lock; may be wrong."""
        return self.closed or self._table.due_or_free(self._pool) != (None, None)

    def _look(self) -> Slot | None:
        """A slot for this member, if there is one."""
        table, cells = self._table, self._table.cells
        with self._lock:
            if self.closed:
                self._event.set()  # others of this pool sleep, too
                raise QueueClosed
            if not table.is_member(self._member):
                cells[at.LATE] += 1
                raise LeaseExpired(
                    f"member {self._member} asks for a slot",
                    "it left the queue, or was revoked",
                    "join again",
                )
            index, free = table.due_or_free(self._pool)
            while index is None:
                if free is None:
                    return None
                if table.issue_ticket(free) == self._pool:
                    index = free
                else:  # another pool's turn: it has a slot of its own now
                    self._notify_producers()
                    index, free = table.due_or_free(self._pool)
            row = table.rows[index]
            table.count_issued(index)
            cells[at.LAST_LEASE] += 1
            cells[row + at.LEASE], cells[row + at.MEMBER] = cells[at.LAST_LEASE], self._member
            cells[row + at.START_VERSION] = cells[at.VERSION]
            now = micros()
            cells[row + at.START_US] = cells[self._seen] = now
            cells[row + at.STATE] = at.RUNNING
            saved = cells[row + at.SAVED]
            return Slot(
                index,
                cells[row + at.TICKET],
                self.memory.slots[index],
                cells[row + at.LEASE],
                self._member,
                self._pool,
                cells[row + at.POOL_TICKET],
                used=saved - 2 if saved > 1 else None,
                is_saved=saved > 0,
                on_progress=self.progress,
                on_save=self.save,
            )
