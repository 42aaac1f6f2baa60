"""The table of a queue's slots: which is in which state, who holds it and since when.

It is made of 64-bit cells in the memory of one process or of several. The table is changed under
its queue's lock; a process killed between two stores leaves a state that reads as "before" or
"after", as of a slot's cells the state is always stored last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl.core.queue import PoolCounts, QueueStats, Ticket
from unirl.host import micros

FREE, RUNNING, READY, TAKEN, DUE = range(5)
STATE_NAMES = ("free", "running", "ready", "taken", "due")
"""due: nobody holds the slot, but its ticket is still to be done."""

(
    CLOSED, VERSION, NEXT_TICKET, LAST_LEASE, LAST_MEMBER, COMMITTED, LEARNED, LATE, BACKLOG,
    _NUM_HEADER,
) = range(10)  # fmt: skip
"""Cells of the whole table. BACKLOG: how many restored tickets have found no slot yet."""
ISSUED, DISCARDED, LEARNED_OF_POOL, _NUM_POOL = range(4)
"""Cells of a pool."""
NUMBER, POOL_OF_MEMBER, SEEN_US, _NUM_MEMBER = range(4)
"""Cells of a member; NUMBER is 0 where the row is free."""
(
    STATE, TICKET, POOL, POOL_TICKET, LEASE, MEMBER, START_VERSION, START_US, FIRST, LAST, USED,
    WAIT_US, WORK_US, SAVED, _NUM_SLOT,
) = range(15)  # fmt: skip
"""Cells of a slot. SAVED: 2 + USED of what was saved of a sample; 0: nothing."""
MAX_MEMBERS = 1024


def num_cells(num_slots: int, num_pools: int, num_reasons: int) -> int:
    """How many cells the table of such a queue has."""
    return (
        _NUM_HEADER
        + num_pools * _NUM_POOL
        + num_reasons
        + MAX_MEMBERS * _NUM_MEMBER
        + num_slots * _NUM_SLOT
    )


class SlotTable:
    """Where everything is in the cells, and the questions that queue and members have.

    cells: `num_cells(...)` cells, zeroed by their creator. What reads several of them without the
    queue's lock sees each at a moment of its own.
    """

    def __init__(
        self, cells: memoryview, num_slots: int, shares: Sequence[float], reasons: Sequence[str]
    ) -> None:
        self.cells, self.shares, self.reasons = cells, shares, reasons
        self.pools = [_NUM_HEADER + i * _NUM_POOL for i in range(len(shares))]
        self._discarded = _NUM_HEADER + len(shares) * _NUM_POOL
        self._members = self._discarded + len(reasons)
        first_row = self._members + MAX_MEMBERS * _NUM_MEMBER
        self.rows = [first_row + i * _NUM_SLOT for i in range(num_slots)]
        # One cell of every member or slot, read in one go: views of the table, not copies.
        self._member_numbers = cells[self._members : first_row][NUMBER::_NUM_MEMBER]
        slots = cells[first_row : first_row + num_slots * _NUM_SLOT]
        self.states, self.tickets = slots[STATE::_NUM_SLOT], slots[TICKET::_NUM_SLOT]
        self._slot_pools, self._pool_tickets = slots[POOL::_NUM_SLOT], slots[POOL_TICKET::_NUM_SLOT]
        self._holders = slots[MEMBER::_NUM_SLOT]

    def stats(self) -> QueueStats:
        cells, states = self.cells, self.states.tolist()
        return QueueStats(
            states={name: states.count(state) for state, name in enumerate(STATE_NAMES)},
            started=cells[NEXT_TICKET],
            committed=cells[COMMITTED],
            learned=cells[LEARNED],
            discarded=self.discarded(),
            late=cells[LATE],
            pools=[
                PoolCounts(*(cells[row + i] for i in (ISSUED, DISCARDED, LEARNED_OF_POOL)))
                for row in self.pools
            ],
        )

    def discarded(self) -> dict[str, int]:
        """How many slots were discarded since the queue was made, by reason."""
        return {name: self.cells[self._discarded + i] for i, name in enumerate(self.reasons)}

    def count_discards(self, reason: str, number: int = 1) -> None:
        """Count slots discarded for a reason."""
        self.cells[self._discarded + self.reasons.index(reason)] += number

    def ticket(self, index: int) -> Ticket:
        """The ticket of a slot."""
        row = self.rows[index]
        return Ticket(*(self.cells[row + i] for i in (TICKET, POOL, POOL_TICKET)))

    def holders(self) -> list[tuple[int, int]]:
        """Each running slot, and the member that fills it."""
        both = zip(self.states.tolist(), self._holders.tolist(), strict=True)
        return [(index, member) for index, (state, member) in enumerate(both) if state == RUNNING]

    def held_by(self, member: int) -> list[int]:
        """The slots that a member fills."""
        return [index for index, holder in self.holders() if holder == member]

    def has_its_part(self, member: int, pool: int) -> bool:
        """Whether the member holds as many slots as there are for each of the pool's members."""
        rows = self.member_rows()
        number = sum(self.cells[row + POOL_OF_MEMBER] == pool for row in rows)
        return number > 1 and len(self.held_by(member)) >= -(-len(self.rows) // number)

    def ages(self, learner_version: int) -> tuple[list[int], list[int]]:
        """Ages in updates of the running slots (since their start) and of the ready ones."""
        cells = self.cells

        def of(state: int, since: int) -> list[int]:
            rows = [row for row in self.rows if cells[row + STATE] == state]
            return [learner_version - cells[row + since] for row in rows]

        return of(RUNNING, START_VERSION), of(READY, FIRST)

    def describe(self, names: Mapping[int, str]) -> str:
        """One sentence on who holds the slots. names: of members, where they have one."""
        cells, now = self.cells, micros()
        states = self.stats().states
        counts = ", ".join(f"{number} {name}" for name, number in states.items() if number)
        running = [
            f"{names.get(cells[row + MEMBER], f'member {cells[row + MEMBER]}')} has held ticket "
            f"{cells[row + TICKET]} for {(now - cells[row + START_US]) / 1e6:.0f} s"
            for row in self.rows
            if cells[row + STATE] == RUNNING
        ]
        return "; ".join([f"of {len(self.rows)} slots: {counts}", ", ".join(running)]).rstrip("; ")

    # -- members -----------------------------------------------------------------------------------

    def member_row(self, member: int) -> int:
        """Where the cells of a member with this number are, if it is one."""
        return self._members + member % MAX_MEMBERS * _NUM_MEMBER

    def is_member(self, member: int) -> bool:
        """Whether it joined and has neither left nor been revoked."""
        return bool(self.cells[self.member_row(member) + NUMBER] == member)

    def member_rows(self) -> list[int]:
        """The rows of all members."""
        numbers = self._member_numbers.tolist()
        return [self._members + i * _NUM_MEMBER for i, number in enumerate(numbers) if number]

    # -- which slot a member may have --------------------------------------------------------------

    def due_or_free(self, pool: int) -> tuple[int | None, int | None]:
        """The slot with the lowest due ticket of a pool; and one without a ticket: none is free as
        long as restored tickets wait for one.
        """
        states, due = self.states.tolist(), None
        if DUE in states:
            pools, tickets = self._slot_pools.tolist(), self.tickets.tolist()
            own = [i for i, state in enumerate(states) if state == DUE and pools[i] == pool]
            due = min(own, key=tickets.__getitem__, default=None)
        free = states.index(FREE) if FREE in states and not self.cells[BACKLOG] else None
        return due, free

    def ready_slots(self, window: int | None) -> list[int]:
        """The ready slots that may be learned, lowest ticket first: each with less than `window`
        unfinished ones below it, or all of them.
        """
        states, tickets = self.states.tolist(), self.tickets.tolist()
        ready = [i for i, state in enumerate(states) if state == READY]
        if window is not None and ready:
            unfinished = [tickets[i] for i, state in enumerate(states) if state in (RUNNING, DUE)]
            if len(unfinished) >= window:
                limit = min(unfinished) if window == 1 else sorted(unfinished)[window - 1]
                ready = [i for i in ready if tickets[i] < limit]
        return sorted(ready, key=tickets.__getitem__)

    def next_pool(self) -> int:
        """The pool that the next ticket belongs to: the one that is furthest behind its share."""
        if len(self.pools) == 1:
            return 0
        cells = self.cells

        def progress(pool: int) -> float:
            row = self.pools[pool]
            return (cells[row + ISSUED] - cells[row + DISCARDED] + 1) / self.shares[pool]

        return min(range(len(self.pools)), key=progress)

    def issue_ticket(self, index: int) -> int:
        """Put the next ticket into a free slot, as due; returns its pool."""
        cells, row, pool = self.cells, self.rows[index], self.next_pool()
        cells[row + TICKET], cells[row + POOL] = cells[NEXT_TICKET], pool
        cells[row + POOL_TICKET] = cells[self.pools[pool] + ISSUED]
        cells[row + SAVED] = 0
        # First due, then counted: a process killed in between loses no ticket.
        cells[row + STATE] = DUE
        self.count_issued(index)
        return pool

    def count_issued(self, index: int) -> None:
        """Count a slot's ticket as issued, once or again."""
        cells, row = self.cells, self.rows[index]
        cells[NEXT_TICKET] = max(cells[NEXT_TICKET], cells[row + TICKET] + 1)
        issued = self.pools[cells[row + POOL]] + ISSUED
        cells[issued] = max(cells[issued], cells[row + POOL_TICKET] + 1)

    def count_all_issued(self) -> None:
        """As the process that was killed while it acquired would have done."""
        found = [
            (pool, ticket, pool_ticket)
            for state, pool, ticket, pool_ticket in zip(
                self.states.tolist(),
                self._slot_pools.tolist(),
                self.tickets.tolist(),
                self._pool_tickets.tolist(),
                strict=True,
            )
            if state != FREE
        ]
        newest = max((ticket for _, ticket, _ in found), default=-1)
        self.cells[NEXT_TICKET] = max(self.cells[NEXT_TICKET], newest + 1)
        for pool, row in enumerate(self.pools):
            newest = max((number for each, _, number in found if each == pool), default=-1)
            self.cells[row + ISSUED] = max(self.cells[row + ISSUED], newest + 1)
