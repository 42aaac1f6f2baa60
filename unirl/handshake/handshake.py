"""Where environment workers and policy workers meet: a table in shared memory that says whose turn
each group of environments is, for each policy that plays in it.

Payloads never pass here: observations and actions are in the queue's slots, which both sides map.
The turn of each split of a group goes round

    HELLO -> BEGIN -> OBS -> ACT -> OBS -> ACT -> ...

HELLO: the environments are reset. BEGIN: the policy worker named a slot, the worker shall write
row 0. OBS: the observation of a row is there, the policy worker's turn. ACT: the action is there,
the environment worker's turn. Only the side whose turn it is writes, so no lock is needed. When a
worker died, a runner says so in another cell (LOST): the policy worker discards the slot and sets
EMPTY, and a new worker begins with HELLO.

    handshake = Handshake(HandshakeLayout(num_workers=2, num_groups=2), transport)
"""

from __future__ import annotations

from typing import Any

from unirl.core.queue import REASONS
from unirl.core.transport import Transport
from unirl.handshake.layout import HandshakeLayout
from unirl.host import micros

EMPTY, HELLO, BEGIN, OBS, ACT = range(5)
# Cells of a split, the turn always written last. LOST: 0, or 1 + the reason's index.
TURN, SLOT, ROW, SINCE_US, SEED, LOST, _NUM_SPLIT = range(7)
# Of a group.
_STARTED_US, _WORK_US, _STEPS, _NUM_GROUP = range(4)
# Of a worker.
_PROGRESS_US, _NUM_WORKER = range(2)
# Of an actor.
_BUSY_US, _FORWARDS, _ROWS, _NUM_ACTOR = range(4)
_START_SECONDS = 120.0
"""How long a worker may take to make and reset its environments."""


class Handshake:
    """The table of turns, and an event for each worker and each actor. Picklable where the
    transport's memory is.
    """

    def __init__(self, layout: HandshakeLayout, transport: Transport) -> None:
        self.layout = layout
        self._table = transport.cells(
            layout.num_splits * _NUM_SPLIT
            + layout.num_workers * layout.num_groups * _NUM_GROUP
            + layout.num_workers * _NUM_WORKER
            + layout.num_policies * layout.num_actors * _NUM_ACTOR
        )
        self.worker_events = [transport.event() for _ in range(layout.num_workers)]
        self.actor_events = [
            transport.event() for _ in range(layout.num_policies * layout.num_actors)
        ]
        self._attach()
        for split in range(layout.num_splits):  # the workers' time to start begins
            self.cells[self.row(split) + SINCE_US] = micros()

    def _attach(self) -> None:
        layout = self.layout
        self.cells = self._table.view()
        self._groups = layout.num_splits * _NUM_SPLIT
        self._workers = self._groups + layout.num_workers * layout.num_groups * _NUM_GROUP
        self._actors = self._workers + layout.num_workers * _NUM_WORKER

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cells"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    def row(self, split: int) -> int:
        """Where a split's cells begin."""
        return split * _NUM_SPLIT

    def give_turn(self, split: int, turn: int) -> None:
        """Hand the split over, with the time."""
        row = self.row(split)
        self.cells[row + SINCE_US] = micros()
        self.cells[row + TURN] = turn

    def clear(self, split: int) -> None:
        """Nothing of a dead worker is left in this split: a new one may say hello."""
        self.give_turn(split, EMPTY)
        self.cells[self.row(split) + LOST] = 0

    # -- what each side says of itself -------------------------------------------------------------

    def begin_work(self, worker: int, group: int) -> None:
        """A worker starts to step one of its groups."""
        now = micros()
        self.cells[self._groups + group * _NUM_GROUP + _STARTED_US] = now
        self.cells[self._workers + worker * _NUM_WORKER + _PROGRESS_US] = now

    def end_work(self, worker: int, group: int) -> None:
        """A worker has stepped one of its groups."""
        row, now, cells = self._groups + group * _NUM_GROUP, micros(), self.cells
        cells[self._workers + worker * _NUM_WORKER + _PROGRESS_US] = now
        cells[row + _WORK_US] += now - cells[row + _STARTED_US]
        cells[row + _STEPS] += 1
        cells[row + _STARTED_US] = 0

    def count_forward(self, actor: int, started_us: int, num_rows: int) -> None:
        """An actor has decided for so many rows."""
        row = self._actors + actor * _NUM_ACTOR
        self.cells[row + _BUSY_US] += micros() - started_us
        self.cells[row + _FORWARDS] += 1
        self.cells[row + _ROWS] += num_rows

    def group_totals(self, group: int) -> tuple[float, int]:
        """Seconds that a group has been stepped, and how often."""
        row = self._groups + group * _NUM_GROUP
        return self.cells[row + _WORK_US] / 1e6, self.cells[row + _STEPS]

    def actor_totals(self, actor: int) -> tuple[float, int, int]:
        """Seconds that an actor has computed, its forward passes, and their rows."""
        row = self._actors + actor * _NUM_ACTOR
        return (
            self.cells[row + _BUSY_US] / 1e6,
            self.cells[row + _FORWARDS],
            self.cells[row + _ROWS],
        )

    # -- what a runner asks and says: of deaths when the process is gone for good, before it starts
    # another instead

    def worker_died(self, worker: int, reason: str) -> None:
        """Have its unfinished samples discarded for this reason, by the actors that hold them."""
        for split in self.layout.splits_of_worker(worker):
            # Not the turn: the policy worker may be about to change it.
            self.cells[self.row(split) + SINCE_US] = micros()
            self.cells[self.row(split) + LOST] = 1 + REASONS.index(reason)
            self.actor_events[self.layout.actor_of(split)].set()
        for group in self.layout.groups_of(worker):
            self.cells[self._groups + group * _NUM_GROUP + _STARTED_US] = 0
        self.cells[self._workers + worker * _NUM_WORKER + _PROGRESS_US] = 0

    def actor_died(self, actor: int) -> None:
        """Forget its unfinished samples; its workers are dead too."""
        own = set(self.layout.splits_of_actor(actor))
        for worker in self.layout.workers_of(actor):
            self.worker_died(worker, "actor_died")  # to the actors of other policies it has
            for split in own & set(self.layout.splits_of_worker(worker)):
                self.clear(split)

    def late_workers(self, seconds: float) -> list[int]:
        """Workers that have owed an answer for longer than this."""
        return [w for w in range(self.layout.num_workers) if self._is_late(w, seconds)]

    def _is_late(self, worker: int, seconds: float) -> bool:
        # A group may wait until the worker has stepped others: what counts is that it gets on.
        now, cells = micros(), self.cells
        progress = cells[self._workers + worker * _NUM_WORKER + _PROGRESS_US]
        for group in self.layout.groups_of(worker):
            started = cells[self._groups + group * _NUM_GROUP + _STARTED_US]
            rows = [self.row(split) for split in self.layout.splits_of_group(group)]
            # Whatever stands there still, a worker that follows a dead one owes nothing yet.
            turns = {EMPTY if cells[row + LOST] else cells[row + TURN] for row in rows}
            since = max(cells[row + SINCE_US] for row in rows)
            owes = turns == {ACT} or BEGIN in turns
            limit = seconds if owes or started else max(seconds, _START_SECONDS)
            waited = now - (started or max(progress, since))
            if (owes or started or EMPTY in turns) and waited > limit * 1e6:
                return True
        return False
