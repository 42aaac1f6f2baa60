"""The law of the queue over one table of slots, whatever memory the table lies in and whatever lock
guards it.

What a place says is written by whoever holds it: its actor while it runs, the learner once it is
ready. So `commit`, `take` and `release` shut out no other process (`Guard.own`); the lock is for
what several contend for: free places (but see `_refill`), tickets, the counts of discards.

`LocalQueue` is the table in plain memory for threads of one process; `unirl.transports.shared` puts
the very same table between processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from unirl.core.guard import Guard, LocalGuard
from unirl.core.queue import QueueConfig, Snapshot
from unirl.core.sample import Batch, SampleSpec, Slot
from unirl.core.slot_table import (
    ACTOR,
    BACKLOG,
    CLOSED,
    DUE,
    FIRST,
    FREE,
    LAST,
    LEARNED,
    NEXT_TICKET,
    READY,
    REASONS,
    RUNNING,
    START_US,
    START_VERSION,
    STATE,
    STATE_NAMES,
    TAKEN,
    TICKET,
    VERSION,
    WAIT_US,
    WORK_US,
    SlotTable,
    table_words,
)
from unirl.core.waiters import Waiters
from unirl.errors import DeadlineExceeded, QueueClosed, UniRLError

LEARNER = 0
"""The learner's bell; actor i listens to bell i + 1."""


class SlotQueue(SlotTable):
    """The law over a table of int64 words. Use LocalQueue or SharedQueue, which bring the memory.

    words: `table_words(...)` int64 words, zeroed by the creator. slots: the data tree of each
    place.
    """

    def __init__(
        self,
        config: QueueConfig,
        words: memoryview,
        slots: Sequence[Mapping[str, Any]],
        guard: Guard,
        *,
        num_actors: int,
        reasons: tuple[str, ...] = REASONS,
    ) -> None:
        super().__init__(words, config.num_slots, num_actors, reasons)
        self.config = config
        self._data, self._guard = slots, guard
        self._waiters = Waiters(words[self._waiting : self._waiting + num_actors + 1], guard)
        self._all_bells = range(num_actors + 1)
        self._actor_bells = self._all_bells[1:]
        self._first_ticket = 0
        # Taken by an unfinished `take`: a deadline must not lose them.
        self._partial: list[Slot] = []
        # Restored tickets that found no place; the learner's process alone has them.
        self._backlog: list[int] = []
        # Events of places that a device still writes; only within one process.
        self._ready: dict[int, Any] = {}

    # -- the actor's side

    def acquire(self, timeout: float | None = None, *, actor: int = 0) -> Slot:
        """See SampleQueue. Raises DeadlineExceeded after `timeout` seconds, QueueClosed when the
        run is over.
        """
        slot = self._look_for_free(actor, sure=True)
        if slot is None:
            started = time.monotonic()
            look = partial(self._look_for_free, actor)
            slot = self._waiters.wait_for(1 + actor, look, timeout)
            if slot is None:
                raise self._too_late(f"actor {actor}", "a free slot", timeout)
            slot.wait_seconds = time.monotonic() - started
        return slot

    def try_acquire(self, actor: int = 0) -> Slot | None:
        """As acquire, without waiting. None: no place is free, and this actor's bell will ring when
        one may be.
        """
        self._waiters.mark(1 + actor)
        slot = self._look_for_free(actor, sure=True)
        if slot is not None:
            self._waiters.mark(1 + actor, False)
        return slot

    def _look_for_free(self, actor: int, sure: bool) -> Slot | None:
        """A place for this actor. Unless sure, without the lock where there seems to be none: a
        change of this moment may go unseen.
        """
        words = self._words
        if not sure and self._acquirable() is None and not words[CLOSED]:
            return None
        with self._guard:
            self._raise_if_closed()
            index = self._acquirable()
            if index is None:
                return None
            row = self._rows[index]
            if words[row + STATE] == FREE:
                # First due, then drawn: whoever is killed in between loses no ticket.
                words[row + TICKET] = words[NEXT_TICKET]
                words[row + STATE] = DUE
            self._count_as_drawn(words[row + TICKET])
            words[row + ACTOR] = actor
            words[row + START_VERSION] = words[VERSION]
            words[row + START_US] = int(time.monotonic() * 1e6)  # whoever waited held nothing
            words[row + STATE] = RUNNING
        # Outside the lock: the place is this actor's now.
        return Slot(index, words[row + TICKET], self._data[index], actor)

    def _acquirable(self) -> int | None:
        """The place of the lowest ticket that is due, else a free one."""
        backlog, states = self._words[BACKLOG], self._states.tolist()
        if DUE in states:
            due = [index for index, state in enumerate(states) if state == DUE]
            return min(due, key=self._tickets.__getitem__)
        return states.index(FREE) if FREE in states and not backlog else None

    def slot_data(self, index: int) -> Mapping[str, Any]:
        """The memory of one place, for whoever helps its actor to fill it."""
        return self._data[index]

    def ring_actor(self, actor: int) -> None:
        """Wake an actor that waits, for a place or for its helpers."""
        self._guard.ring(1 + actor)

    def wait_as_actor(self, actor: int, seconds: float) -> None:
        """Sleep until this actor's bell rings, at most `seconds`; may return early."""
        self._guard.wait(1 + actor, seconds)

    def commit(self, slot: Slot) -> None:
        """See SampleQueue."""
        if slot.first_version < 0 or slot.last_version < slot.first_version:
            raise UniRLError(
                f"slot of ticket {slot.ticket} was committed with versions "
                f"{slot.first_version}..{slot.last_version}",
                "0 <= first_version <= last_version must hold",
                "the actor sets both to the version that WeightStore.pull returned",
            )
        words, row = self._words, self._rows[slot.index]
        wait_us, work_us = int(slot.wait_seconds * 1e6), int(slot.work_seconds * 1e6)
        with self._guard.own:
            self._require(slot, RUNNING)
            actor = words[row + ACTOR]
            self._ready[slot.index] = slot.ready
            words[row + FIRST] = slot.first_version
            words[row + LAST] = slot.last_version
            words[row + WAIT_US] = wait_us
            words[row + WORK_US] = work_us
            words[row + STATE] = READY
            words[self._committed + actor] += 1
        self._waiters.ring([LEARNER])

    def discard(self, slot: Slot, reason: str) -> None:
        """See SampleQueue. Raises UniRLError for a reason that was not declared."""
        with self._guard:
            self._require(slot, RUNNING)
            self._free(slot.index, reason)
        # The learner too: strict order may have waited for exactly this slot.
        self._waiters.ring(self._all_bells)

    def reissue(self, slot: Slot) -> None:
        """See SampleQueue: for recipes whose tickets name something that must not be lost, such as
        a prompt.
        """
        with self._guard:
            self._require(slot, RUNNING)
            self._put_back(slot.index)
        self._waiters.ring(self._all_bells)

    # -- the learner's side

    def take(self, learner_version: int, timeout: float | None = None) -> Batch:
        """See SampleQueue. Slots are taken one by one: waiting for a whole batch inside the window
        would deadlock.
        """
        started, taken = time.monotonic(), self._partial
        timeout = self.config.timeout_seconds if timeout is None else timeout
        look = partial(self._look_for_ready, learner_version)
        self._words[VERSION] = learner_version
        while len(taken) < self.config.batch_size:
            slot = look(False) or self._waiters.wait_for(LEARNER, look, timeout)
            if slot is None:
                raise self._too_late("the learner", "a finished slot", timeout)
            taken.append(slot)
        self._partial = []
        return Batch(taken, learner_version, wait_seconds=time.monotonic() - started)

    def _look_for_ready(self, learner_version: int, sure: bool) -> Slot | None:
        """The slot to learn next, taken. Unless sure, without the lock, as in `_look_for_free`. A
        learner that starves does enter it, and so notices who holds it for too long.
        """
        words = self._words
        if not sure and READY not in self._states.tolist() and not words[CLOSED]:
            return None
        if sure and self._backlog:
            # Actors do not see the backlog: places that they gave back are filled here.
            with self._guard.own:
                self._refill()
            self._waiters.ring(self._actor_bells)
        while True:
            with self._guard if sure else self._guard.own:
                self._raise_if_closed()
                index = self._next_ready()
                if index is None:
                    return None
                row = self._rows[index]
                if learner_version - words[row + FIRST] <= self.config.max_staleness:
                    words[row + STATE] = TAKEN
                    return self._slot(index)
            # It is ready, so nobody else's: it cannot change in between.
            with self._guard:
                self._free(index, "stale")
            self._waiters.ring(self._all_bells)

    def release(self, batch: Batch) -> None:
        """See SampleQueue."""
        words = self._words
        with self._guard.own:
            for slot in batch.slots:
                self._require(slot, TAKEN)
            # The loop published before it released: samples started from now on see weights one
            # update newer.
            words[VERSION] = batch.version + 1
            for slot in batch.slots:
                self._vacate(slot.index)
            words[LEARNED] += len(batch.slots)
        self._waiters.ring(self._actor_bells)

    def close(self) -> None:
        """See SampleQueue."""
        # One whole word, stored without the lock: closing must work whoever holds it.
        self._words[CLOSED] = 1
        for bell in self._all_bells:
            self._guard.ring(bell)

    # -- faults, checkpoints, the log

    def reclaim(self, actor: int, reason: str = "actor_died", *, reissue: bool = False) -> int:
        """Discard what a dead actor left unfinished, so that its places are issued again; returns
        how many. reissue: their tickets too, then nothing is discarded.
        """
        with self._guard:
            self._waiters.mark(1 + actor, False)
            self._count_all_as_drawn()
            lost = [
                i
                for i, row in enumerate(self._rows)
                if self._held(row, RUNNING) and self._words[row + ACTOR] == actor
            ]
            for index in lost:
                if reissue:
                    self._put_back(index)
                else:
                    self._free(index, reason)
            self._balance(reason)
        self._waiters.ring(self._all_bells)
        return len(lost)

    def snapshot(self) -> Snapshot:
        """What a checkpoint must know, as of one moment: a ticket is in one place, or in another,
        or not drawn yet. For the learner, whose alone the ready samples are.
        """
        words = self._words
        with self._guard:
            # Read in one go: actors commit meanwhile.
            states = self._states.tolist()
            self._count_all_as_drawn()
            # Taken and not released: a learner that failed on them has not learned them.
            waiting = [self._slot(i) for i, state in enumerate(states) if state in (READY, TAKEN)]
            unfinished = [self._tickets[i] for i, s in enumerate(states) if s in (RUNNING, DUE)]
            return Snapshot(
                sorted(waiting, key=lambda slot: slot.ticket),
                sorted([*map(int, unfinished), *self._backlog]),
                int(words[NEXT_TICKET]),
                self.discarded(),
            )

    def restore(
        self,
        ready: Sequence[Slot],
        next_ticket: int,
        version: int = 0,
        *,
        due: Sequence[int] = (),
    ) -> None:
        """Put acknowledged samples of an earlier run back, before anyone acquires. Data is copied
        by the caller. next_ticket: above all others. due: tickets to issue anew, the lowest first;
        those that find no place get the next ones that come free.
        """
        words = self._words
        with self._guard:
            for slot in ready:
                row = self._rows[slot.index]
                words[row + TICKET], words[row + ACTOR] = slot.ticket, slot.actor
                words[row + FIRST], words[row + LAST] = slot.first_version, slot.last_version
                words[row + STATE] = READY
            empty = [row for row in self._rows if words[row + STATE] == FREE]
            tickets = sorted(due)
            for row, ticket in zip(empty, tickets, strict=False):
                words[row + TICKET], words[row + STATE] = ticket, DUE
            self._backlog = tickets[len(empty) :]
            words[BACKLOG] = len(self._backlog)
            words[NEXT_TICKET], words[VERSION] = next_ticket, version
            self._first_ticket = next_ticket - len(ready) - len(due)

    def place(self, index: int) -> Mapping[str, Any]:
        """The memory of one place, for `restore`."""
        return self._data[index]

    def _count_as_drawn(self, ticket: int) -> None:
        self._words[NEXT_TICKET] = max(self._words[NEXT_TICKET], ticket + 1)

    def _count_all_as_drawn(self) -> None:
        """As whoever was killed while it acquired would have done."""
        for state, ticket in zip(self._states.tolist(), self._tickets.tolist(), strict=True):
            if state != FREE:
                self._count_as_drawn(ticket)

    def _balance(self, reason: str) -> None:
        """Count what a kill between two stores left out, a discard that was done: for this reason,
        as its own is not known.
        """
        words = self._words
        started = words[NEXT_TICKET] - self._first_ticket
        out = sum(words[row + STATE] != FREE for row in self._rows) + len(self._backlog)
        told = sum(words[self._discarded + i] for i in range(len(self._reasons)))
        words[self._discarded + self._reasons.index(reason)] += (
            started - words[LEARNED] - told - out
        )

    # -- inside

    def _next_ready(self) -> int | None:
        """The ready slot of the lowest ticket among the first `window` outstanding ones."""
        # Actors go on while this looks. What is acquired meanwhile gets a ticket of `end` or above
        # and counts as not there; of those below, each stays where it is until it is discarded.
        end, states = self._words[NEXT_TICKET], self._states.tolist()
        tickets = self._tickets.tolist()
        outstanding = [
            (tickets[index], index)
            for index, state in enumerate(states)
            if state in (RUNNING, READY, DUE) and tickets[index] < end
        ]
        outstanding.sort()
        for _, index in outstanding[: self.config.window]:
            if states[index] == READY:
                return index
        return None

    def _slot(self, index: int) -> Slot:
        words, row = self._words, self._rows[index]
        return Slot(
            index,
            words[row + TICKET],
            self._data[index],
            words[row + ACTOR],
            words[row + FIRST],
            words[row + LAST],
            words[row + WAIT_US] / 1e6,
            words[row + WORK_US] / 1e6,
            self._ready.get(index),
        )

    def _free(self, index: int, reason: str) -> None:
        if reason not in self._reasons:
            raise UniRLError(
                f"discard reason {reason!r} is unknown",
                f"declared are {', '.join(self._reasons)}",
                "declare it in the plan",
            )
        # Done before it is counted: what a kill in between leaves uncounted, `_balance` finds.
        self._vacate(index)
        self._words[self._discarded + self._reasons.index(reason)] += 1

    def _vacate(self, index: int) -> None:
        """Nobody's place from now on, or that of a ticket which waits for one."""
        self._words[self._rows[index] + STATE] = FREE
        if self._backlog:
            self._refill()

    def _refill(self) -> None:
        """Free places for the lowest tickets of the backlog. Only this process has one, and as long
        as BACKLOG is not 0 all free places are its own: it needs no lock between processes.
        """
        words = self._words
        for row in self._rows:
            if words[row + STATE] == FREE and self._backlog:
                words[row + TICKET] = self._backlog.pop(0)
                words[row + STATE] = DUE
        words[BACKLOG] = len(self._backlog)

    def _put_back(self, index: int) -> None:
        self._words[self._rows[index] + STATE] = DUE

    def _require(self, slot: Slot, state: int) -> None:
        row = self._rows[slot.index]
        found = self._words[row + STATE]
        if found != state or self._words[row + TICKET] != slot.ticket:
            raise UniRLError(
                f"slot {slot.index} of ticket {slot.ticket} is not {STATE_NAMES[state]}",
                f"it is {STATE_NAMES[found]} with ticket {self._words[row + TICKET]}",
                "a slot is committed or discarded exactly once, and released exactly once",
            )

    def _raise_if_closed(self) -> None:
        if self._words[CLOSED]:
            raise QueueClosed

    def _too_late(self, who: str, what: str, timeout: float | None) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{who} waited {timeout:g} s for {what}",
            self.waited_for(),
            "look at the log of whoever holds them, or raise the deadline",
        )


class LocalQueue(SlotQueue):
    """The queue for one process: plain memory, any number of threads."""

    def __init__(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        *,
        num_actors: int = 1,
        reasons: tuple[str, ...] = REASONS,
    ) -> None:
        words = memoryview(
            bytearray(8 * table_words(config.num_slots, num_actors, len(reasons)))
        ).cast("q")
        slots = [spec.allocate() for _ in range(config.num_slots)]
        super().__init__(
            config, words, slots, LocalGuard(num_actors + 1), num_actors=num_actors, reasons=reasons
        )
