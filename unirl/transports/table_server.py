"""The learner's side of the sample queue over a table of slots."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from unirl.core.queue import (
    MemberStatus,
    QueueClient,
    QueueConfig,
    QueueStats,
    SlotBuffers,
    Snapshot,
    Ticket,
)
from unirl.core.sample import Batch, Slot
from unirl.errors import DeadlineExceeded, UniRLError
from unirl.host import micros
from unirl.transports import slot_table as at
from unirl.transports.events import wait_until
from unirl.transports.table_queue import QueueMemory, TableClient, TableQueue


class TableServer(TableQueue):
    def __init__(self, memory: QueueMemory) -> None:
        super().__init__(memory)
        self._names: dict[int, str] = {}
        self._first_ticket = 0
        # Taken by an unfinished `take`: a deadline must not lose them.
        self._partial: list[Slot] = []
        # Restored tickets that found no slot; their number is in the cells, for the clients.
        self._backlog: list[Ticket] = []

    @property
    def config(self) -> QueueConfig:
        return self.memory.config

    # -- members -----------------------------------------------------------------------------------

    def join(self, pool: int = 0, name: str = "") -> QueueClient:
        """See QueueServer. Raises UniRLError for an unknown pool, or one member too many."""
        return self.new_member(pool, name)

    def new_member(self, pool: int, name: str) -> TableClient:
        """A member of the table."""
        table, cells = self._table, self._table.cells
        if not 0 <= pool < len(table.pools):
            raise UniRLError(
                f"a member joins pool {pool}",
                f"the queue has pools 0 to {len(table.pools) - 1}",
                "declare the pool in the plan",
            )
        with self._lock:
            number = cells[at.LAST_MEMBER] + 1
            last = number + at.MAX_MEMBERS
            while number < last and cells[table.member_row(number) + at.NUMBER]:
                number += 1
            if number == last:
                raise UniRLError(
                    "one more member joins the queue",
                    f"it has {at.MAX_MEMBERS} already, which is the most",
                    "use fewer actors, each with more environments",
                )
            row = table.member_row(number)
            cells[at.LAST_MEMBER] = number
            cells[row + at.POOL_OF_MEMBER], cells[row + at.SEEN_US] = pool, micros()
            cells[row + at.NUMBER] = number
        self._names[number] = name or f"member {number}"
        return TableClient(self.memory, number, pool)

    def revoke(self, member: int, reason: str = "actor_died", *, reissue: bool = False) -> int:
        table, cells = self._table, self._table.cells
        with self._lock:
            if table.is_member(member):
                cells[table.member_row(member) + at.NUMBER] = 0
            table.count_all_issued()
            held = table.held_by(member)
            for index in held:
                cells[table.rows[index] + at.LEASE] = 0
                if reissue:
                    cells[table.rows[index] + at.STATE] = at.DUE
                else:
                    self._discard(index, reason)
            self._refill()
            self._balance(reason)
        self._names.pop(member, None)
        self._notify_producers()
        self.memory.learner_event.set()
        return len(held)

    def retire(self, member: int) -> None:
        with self._lock:
            if self._table.is_member(member):
                self._table.cells[self._table.member_row(member) + at.NUMBER] = 0
        self._notify_producers()

    def members(self) -> list[MemberStatus]:
        cells, now = self._table.cells, micros()
        held = Counter(member for _, member in self._table.holders())
        return [
            MemberStatus(
                cells[row + at.NUMBER],
                cells[row + at.POOL_OF_MEMBER],
                held[cells[row + at.NUMBER]],
                (now - cells[row + at.SEEN_US]) / 1e6,
            )
            for row in self._table.member_rows()
        ]

    def buffers(self) -> SlotBuffers:
        return TableQueue(self.memory)

    # -- learning ----------------------------------------------------------------------------------

    def take(self, learner_version: int, timeout: float | None = None) -> Batch:
        """See QueueServer. Slots are taken as they come: waiting for a whole batch inside the
        window would deadlock.
        """
        started, taken, cells = time.monotonic(), self._partial, self._table.cells
        timeout = self.config.timeout_seconds if timeout is None else timeout
        cells[at.VERSION] = learner_version
        while len(taken) < self.config.batch_size:
            found = wait_until(
                self._look,
                lambda: at.READY in self._table.states.tolist() or self.closed,
                self.memory.learner_event,
                timeout=timeout,
                spin_seconds=self.memory.spin_seconds,
            )
            if found is None:
                raise DeadlineExceeded(
                    f"the learner waited {timeout:g} s for a finished slot",
                    self.describe(),
                    "look at the log of the process that holds them, or raise the deadline",
                )
            taken += found
        self._partial = []
        return Batch(taken, learner_version, wait_seconds=time.monotonic() - started)

    def _look(self) -> list[Slot] | None:
        """The slots to learn next, as many as the batch lacks at most; taken."""
        table, cells, num_freed = self._table, self._table.cells, 0
        found: list[int] = []
        wanted = self.config.batch_size - len(self._partial)
        oldest = cells[at.VERSION] - self.config.max_staleness
        with self._lock:
            self._raise_if_closed()
            if self._backlog:  # members do not see it: slots that they gave back are filled here
                num_freed += self._refill()
            ready = table.ready_slots(self.config.window)
            while ready and len(found) < wanted:
                index = ready.pop(0)
                row = table.rows[index]
                if cells[row + at.FIRST] >= oldest:
                    cells[row + at.STATE] = at.TAKEN
                    found.append(index)
                    continue
                self._discard(index, "stale")
                num_freed += 1
                if self._refill():  # what is due now may be lower than what was ready
                    ready = table.ready_slots(self.config.window)
        if num_freed:
            self._notify_producers()
        return [self._slot(index) for index in found] or None

    def release(self, batch: Batch) -> None:
        table, cells = self._table, self._table.cells
        with self._lock:
            rows = [self._require(slot, at.TAKEN) for slot in batch.slots]
            # The loop published before it released: samples started from now on see weights one
            # update newer.
            cells[at.VERSION] = batch.version + 1
            for row in rows:
                cells[row + at.STATE] = at.FREE
                cells[table.pools[cells[row + at.POOL]] + at.LEARNED_OF_POOL] += 1
            cells[at.LEARNED] += len(rows)
            self._refill()
        self._notify_producers()

    def _slot(self, index: int) -> Slot:
        cells, row = self._table.cells, self._table.rows[index]
        return Slot(
            index,
            cells[row + at.TICKET],
            self.memory.slots[index],
            cells[row + at.LEASE],
            cells[row + at.MEMBER],
            cells[row + at.POOL],
            cells[row + at.POOL_TICKET],
            cells[row + at.FIRST],
            cells[row + at.LAST],
            None if cells[row + at.USED] < 0 else cells[row + at.USED],
            cells[row + at.WAIT_US] / 1e6,
            cells[row + at.WORK_US] / 1e6,
            self.memory.write_events.get(index),
        )

    # -- accounting --------------------------------------------------------------------------------

    def next_pool(self) -> int | None:
        table, states = self._table, self._table.states.tolist()
        due = [index for index, state in enumerate(states) if state == at.DUE]
        if due:
            return table.cells[table.rows[min(due, key=table.tickets.__getitem__)] + at.POOL]
        return None if table.due_or_free(0)[1] is None else table.next_pool()

    def ages(self, learner_version: int) -> tuple[list[int], list[int]]:
        return self._table.ages(learner_version)

    def stats(self) -> QueueStats:
        return self._table.stats()

    def describe(self) -> str:
        return self._table.describe(self._names)

    def snapshot(self) -> Snapshot:
        """See QueueServer. Each ticket is in one slot, or in another, or not issued yet."""
        table, cells = self._table, self._table.cells
        with self._lock:
            states = table.states.tolist()
            table.count_all_issued()
            # Taken and not released: a learner that failed on them has not learned them.
            kept = (at.READY, at.TAKEN)
            ready = [self._slot(i) for i, state in enumerate(states) if state in kept]
            running = [table.ticket(i) for i, s in enumerate(states) if s in (at.RUNNING, at.DUE)]
            return Snapshot(
                sorted(ready, key=lambda slot: slot.ticket),
                sorted([*running, *self._backlog]),
                cells[at.NEXT_TICKET],
                [cells[row + at.ISSUED] for row in table.pools],
                table.discarded(),
            )

    def restore(
        self,
        ready: Sequence[Slot],
        next_ticket: int,
        version: int = 0,
        *,
        due: Sequence[Ticket] = (),
        issued: Sequence[int] | None = None,
    ) -> None:
        """See QueueServer. ready: their data is copied into `buffer(slot.index)` by the caller.
        next_ticket: above all others. due: those that find no slot get the next ones that come
        free. issued: by pool; next_ticket where there is one.
        """
        table, cells = self._table, self._table.cells
        with self._lock:
            for slot in ready:
                row = table.rows[slot.index]
                cells[row + at.TICKET], cells[row + at.POOL] = slot.ticket, slot.pool
                cells[row + at.POOL_TICKET] = slot.pool_ticket
                cells[row + at.FIRST], cells[row + at.LAST] = slot.first_version, slot.last_version
                cells[row + at.USED] = -1 if slot.used is None else slot.used
                cells[row + at.STATE] = at.READY
            self._backlog = sorted(due)
            self._refill()
            cells[at.NEXT_TICKET], cells[at.VERSION] = next_ticket, version
            for row, number in zip(table.pools, issued or [next_ticket], strict=True):
                cells[row + at.ISSUED] = number
            self._first_ticket = next_ticket - len(ready) - len(due)

    def close(self) -> None:
        # One whole cell, stored without the lock: closing must work even while another process
        # holds it.
        self._table.cells[at.CLOSED] = 1
        self._notify_producers()
        self.memory.learner_event.set()

    def _refill(self) -> int:
        """Free slots for the lowest tickets of the backlog; how many."""
        cells, number = self._table.cells, 0
        for row in self._table.rows if self._backlog else ():
            if cells[row + at.STATE] == at.FREE and self._backlog:
                ticket = self._backlog.pop(0)
                cells[row + at.TICKET], cells[row + at.POOL], cells[row + at.POOL_TICKET] = ticket
                cells[row + at.SAVED], cells[row + at.STATE] = 0, at.DUE
                number += 1
        cells[at.BACKLOG] = len(self._backlog)
        return number

    def _balance(self, reason: str) -> None:
        """Count what a kill between two stores left out, a discard that was done: for this reason,
        as its own is not known.
        """
        stats = self._table.stats()
        started = stats.started - self._first_ticket
        counted = stats.learned + sum(stats.discarded.values()) + stats.out + len(self._backlog)
        self._table.count_discards(reason, started - counted)
