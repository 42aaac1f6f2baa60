"""The law of the queue over one table of slots, whatever memory the table lies in and whatever lock
guards it.

`LocalQueue` is the table in plain memory for threads of one process; `unirl.transports.shared` puts
the very same table between processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.core.errors import DeadlineExceeded, QueueClosed, UniRLError
from unirl.core.guard import Guard, LocalGuard
from unirl.core.queue import QueueConfig, Snapshot
from unirl.core.sample import Batch, SampleSpec, Slot
from unirl.core.slot_table import (
    ACTOR,
    CLOSED,
    COMMITTED,
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

LEARNER = 0
"""The learner's bell; actor i listens to bell i + 1."""
# A lost wake-up must never become a hang: every sleeper looks again after this long, whatever
# happened to its bell.
LOOK_AGAIN_SECONDS = 0.1
# What stands in the table for whoever waits. Waking a process takes 50 to 120 microseconds, several
# times as long as copying a slot: so it watches its mark for about as long before it sleeps.
_SLEEPS, _WATCHES = 1, 2
_WATCH_NS = 100_000


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
        self._first_mark = _WATCHES if guard.watches else _SLEEPS
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
        started, mark = time.monotonic(), self._first_mark
        while (slot := self._try_acquire(actor, mark)) is None:
            mark = self._wait(1 + actor, mark, started, timeout)
        slot.wait_seconds = time.monotonic() - started
        return slot

    def try_acquire(self, actor: int = 0) -> Slot | None:
        """As acquire, without waiting. None: no place is free, and this actor's bell will ring when
        one may be.
        """
        return self._try_acquire(actor, _SLEEPS)

    def _try_acquire(self, actor: int, mark: int) -> Slot | None:
        words = self._words
        with self._guard:
            self._raise_if_closed()
            index = self._acquirable()
            if index is None:
                words[self._waiting + 1 + actor] = mark
                return None
            row = self._rows[index]
            if words[row + STATE] == FREE:
                words[row + TICKET] = words[NEXT_TICKET]
                words[NEXT_TICKET] += 1
            words[row + ACTOR] = actor
            words[row + START_VERSION] = words[VERSION]
            words[row + START_US] = int(time.monotonic() * 1e6)  # whoever waited held nothing
            words[row + STATE] = RUNNING
        # The place is this actor's now: what others wait for is over.
        return Slot(index, words[row + TICKET], self._data[index], actor)

    def _acquirable(self) -> int | None:
        """The place of the lowest ticket that is due, else a free one."""
        states = self._states.tolist()
        if DUE in states:
            due = [index for index, state in enumerate(states) if state == DUE]
            return min(due, key=self._tickets.__getitem__)
        return states.index(FREE) if FREE in states else None

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
        with self._guard:
            self._require(slot, RUNNING)
            self._ready[slot.index] = slot.ready
            words[row + FIRST] = slot.first_version
            words[row + LAST] = slot.last_version
            words[row + WAIT_US] = wait_us
            words[row + WORK_US] = work_us
            words[row + STATE] = READY
            words[COMMITTED] += 1
            self._ring_if_waiting(LEARNER)

    def discard(self, slot: Slot, reason: str) -> None:
        """See SampleQueue. Raises UniRLError for a reason that was not declared."""
        with self._guard:
            self._require(slot, RUNNING)
            self._free(slot.index, reason)

    def reissue(self, slot: Slot) -> None:
        """See SampleQueue: for recipes whose tickets name something that must not be lost, such as
        a prompt.
        """
        with self._guard:
            self._require(slot, RUNNING)
            self._put_back(slot.index)

    # -- the learner's side

    def take(self, learner_version: int, timeout: float | None = None) -> Batch:
        """See SampleQueue. Slots are taken one by one: waiting for a whole batch inside the window
        would deadlock.
        """
        words, started, taken = self._words, time.monotonic(), self._partial
        allowed = self.config.max_staleness
        deadline_from, mark = started, self._first_mark
        timeout = self.config.timeout_seconds if timeout is None else timeout
        while len(taken) < self.config.batch_size:
            with self._guard:
                self._raise_if_closed()
                words[VERSION] = learner_version
                index = self._next_ready()
                if index is None:
                    words[self._waiting + LEARNER] = mark
                elif learner_version - words[self._rows[index] + FIRST] > allowed:
                    # One at a time: others get the lock in between.
                    self._free(index, "stale")
                    continue
                else:
                    words[self._rows[index] + STATE] = TAKEN
            if index is None:
                mark = self._wait(LEARNER, mark, deadline_from, timeout)
                continue
            taken.append(self._slot(index))
            deadline_from, mark = time.monotonic(), self._first_mark
        self._partial = []
        return Batch(taken, learner_version, wait_seconds=time.monotonic() - started)

    def release(self, batch: Batch) -> None:
        """See SampleQueue."""
        words = self._words
        with self._guard:
            for slot in batch.slots:
                self._require(slot, TAKEN)
            for slot in batch.slots:
                self._vacate(slot.index)
            words[LEARNED] += len(batch.slots)
            # The loop published before it released: samples started from now on see weights one
            # update newer.
            words[VERSION] = batch.version + 1
            self._ring_waiting_actors()

    def close(self) -> None:
        """See SampleQueue."""
        # One whole word, stored without the lock: closing must work whoever holds it.
        self._words[CLOSED] = 1
        for bell in range(self._num_actors + 1):
            self._guard.ring(bell)

    # -- faults, checkpoints, the log

    def reclaim(self, actor: int, reason: str = "actor_died", *, reissue: bool = False) -> int:
        """Discard what a dead actor left unfinished, so that its places are issued again; returns
        how many. reissue: their tickets too, then nothing is discarded.
        """
        with self._guard:
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
        return len(lost)

    def snapshot(self) -> Snapshot:
        """What a checkpoint must know, as of one moment: a ticket is in one place, or in another,
        or not drawn yet. For the learner, whose alone the ready samples are.
        """
        words = self._words
        with self._guard:
            # Taken and not released: a learner that failed on them has not learned them.
            held = [i for i, row in enumerate(self._rows) if words[row + STATE] in (READY, TAKEN)]
            waiting = [self._slot(i) for i in held]
            unfinished = [row for row in self._rows if words[row + STATE] in (RUNNING, DUE)]
            return Snapshot(
                sorted(waiting, key=lambda slot: slot.ticket),
                sorted([*(int(words[row + TICKET]) for row in unfinished), *self._backlog]),
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
        by the caller. due: tickets to issue anew, the lowest first; those that find no place get
        the next ones that come free.
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
            words[NEXT_TICKET], words[VERSION] = next_ticket, version
            self._first_ticket = next_ticket - len(ready) - len(due)

    def place(self, index: int) -> Mapping[str, Any]:
        """The memory of one place, for `restore`."""
        return self._data[index]

    def _balance(self, reason: str) -> None:
        """Correct the count by what a kill between two stores tore: a ticket drawn but not used, or
        a discard counted but not done.
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
        words, window = self._words, self.config.window
        outstanding = []
        for index, row in enumerate(self._rows):
            state = words[row + STATE]
            if state in (RUNNING, READY, DUE):
                outstanding.append((words[row + TICKET], index, state))
        outstanding.sort()
        for _, index, state in outstanding[:window]:
            if state == READY:
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
        self._words[self._discarded + self._reasons.index(reason)] += 1
        self._vacate(index)
        self._ring_waiting_actors()
        # Strict order may have waited for exactly this slot.
        self._ring_if_waiting(LEARNER)

    def _vacate(self, index: int) -> None:
        """Nobody's place from now on, or that of a ticket which waits for one."""
        row = self._rows[index]
        if self._backlog:
            self._words[row + TICKET] = self._backlog.pop(0)
            self._words[row + STATE] = DUE
        else:
            self._words[row + STATE] = FREE

    def _put_back(self, index: int) -> None:
        self._words[self._rows[index] + STATE] = DUE
        self._ring_waiting_actors()

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

    def _ring_if_waiting(self, bell: int) -> None:
        mark = self._words[self._waiting + bell]
        if mark:
            self._words[self._waiting + bell] = 0
        if mark == _SLEEPS:
            self._guard.ring(bell)

    def _ring_waiting_actors(self) -> None:
        for bell in range(1, self._num_actors + 1):
            self._ring_if_waiting(bell)

    def _wait(self, bell: int, mark: int, started: float, timeout: float | None) -> int:
        """Until there may be something for whoever left `mark`: returns its next mark.

        A mark is only ever left with the lock held, after looking, so no change goes unseen.
        """
        seconds = LOOK_AGAIN_SECONDS
        if timeout is not None:
            left = started + timeout - time.monotonic()
            if left <= 0:
                who, what = f"actor {bell - 1}", "a free slot"
                if bell == LEARNER:
                    who, what = "the learner", "a finished slot"
                raise DeadlineExceeded(
                    f"{who} waited {timeout:g} s for {what}",
                    self.waited_for(),
                    "look at the log of whoever holds them, or raise the deadline",
                )
            seconds = min(seconds, left)
        if mark == _WATCHES:
            return _WATCHES if self._saw_change(bell) else _SLEEPS
        self._guard.wait(bell, seconds)
        return self._first_mark

    def _saw_change(self, bell: int) -> bool:
        """Whether the mark was wiped away while it was watched."""
        words, word, until = self._words, self._waiting + bell, time.monotonic_ns() + _WATCH_NS
        while words[word] == _WATCHES:
            if time.monotonic_ns() > until:
                return False
        return True


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
