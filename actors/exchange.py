"""Where environment workers and policy workers meet: a table in shared memory that says whose turn
each group of environments is.

Payloads never pass here: observations and actions lie in the queue's slots, which both sides map. A
group's word goes round

    HELLO -> BEGIN -> OBS -> ACT -> OBS -> ACT -> ...

HELLO: the environments are reset. BEGIN: the policy worker named a slot, the worker shall write
row 0. OBS: the observation of a row is there, the policy worker's turn. ACT: the action is there,
the environment worker's turn. LOST: the worker died; the policy worker discards the slot and sets
EMPTY, and a new worker begins with HELLO. Only the side whose turn it is writes, so no lock is
needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unirl.core.queue import REASONS
from unirl.transports.shared import Bell, SharedBlock

EMPTY, HELLO, BEGIN, OBS, ACT, LOST = range(6)
# Of a group. A word is written whole, and the turn always last.
TURN, SLOT, ROW, SINCE_US, SEED, REASON, _GROUP_WORDS = range(7)
# Of a worker.
_PROGRESS_US, _WORK_US, _STEPS, _WORKER_WORDS = range(4)
# Of an actor.
_BEAT_US, _BUSY_US, _FORWARDS, _ROWS, _ACTOR_WORDS = range(5)
_START_SECONDS = 120.0
"""How long a worker may take to make and reset its environments."""


@dataclass(frozen=True)
class Layout:
    """Which groups there are: group g of worker w is number w * num_groups + g, and actor w modulo
    the number of actors decides for it.
    """

    num_workers: int
    num_groups: int
    num_actors: int

    def groups_of_worker(self, worker: int) -> list[int]:
        """Numbers of a worker's groups."""
        return [worker * self.num_groups + g for g in range(self.num_groups)]

    def groups_of_actor(self, actor: int) -> list[int]:
        """Numbers of the groups that an actor decides for."""
        return [g for w in self.workers_of(actor) for g in self.groups_of_worker(w)]

    def workers_of(self, actor: int) -> list[int]:
        """Workers that an actor decides for."""
        return list(range(actor, self.num_workers, self.num_actors))

    def worker_of(self, group: int) -> int:
        """The worker that steps a group."""
        return group // self.num_groups


class SharedExchange:
    """See unirl.core.exchange.Exchange, and the module. Picklable while a process is spawned."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        num_words = (
            layout.num_workers * layout.num_groups * _GROUP_WORDS
            + layout.num_workers * _WORKER_WORDS
            + layout.num_actors * _ACTOR_WORDS
        )
        self._block = SharedBlock(8 * num_words, "unirl-exchange")
        self._bells = [Bell() for _ in range(layout.num_workers)]
        self._prepare()
        now = micros()
        for group in range(layout.num_workers * layout.num_groups):
            self.words[self.row(group) + SINCE_US] = now

    def _prepare(self) -> None:
        self.words = memoryview(self._block.buffer).cast("q")
        layout = self.layout
        self._workers = layout.num_workers * layout.num_groups * _GROUP_WORDS
        self._actors = self._workers + layout.num_workers * _WORKER_WORDS

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "block": self._block, "bells": self._bells}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.layout, self._block, self._bells = state["layout"], state["block"], state["bells"]
        self._prepare()

    def row(self, group: int) -> int:
        """Where a group's words begin."""
        return group * _GROUP_WORDS

    def give_turn(self, group: int, turn: int) -> None:
        """Hand the group over, with the time."""
        row = self.row(group)
        self.words[row + SINCE_US] = micros()
        self.words[row + TURN] = turn

    def ring_worker(self, worker: int) -> None:
        """Wake an environment worker, now or when it next waits."""
        self._bells[worker].ring()

    def wait_as_worker(self, worker: int, seconds: float) -> None:
        """Sleep until this worker's bell rings, at most `seconds`."""
        self._bells[worker].wait(seconds)

    # -- what each side tells of itself ------------------------------------------------------------

    def begin_work(self, worker: int) -> int:
        """A worker starts to step; the time."""
        now = micros()
        self.words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US] = now
        return now

    def end_work(self, worker: int, started_us: int) -> None:
        """A worker has stepped one group."""
        row, now = self._workers + worker * _WORKER_WORDS, micros()
        self.words[row + _PROGRESS_US] = now
        self.words[row + _WORK_US] += now - started_us
        self.words[row + _STEPS] += 1

    def beat(self, actor: int) -> None:
        """An actor is alive."""
        self.words[self._actors + actor * _ACTOR_WORDS + _BEAT_US] = micros()

    def count_forward(self, actor: int, started_us: int, num_rows: int) -> None:
        """An actor has decided for so many rows."""
        row = self._actors + actor * _ACTOR_WORDS
        self.words[row + _BUSY_US] += micros() - started_us
        self.words[row + _FORWARDS] += 1
        self.words[row + _ROWS] += num_rows

    def worker_totals(self, worker: int) -> tuple[float, int]:
        """Seconds that a worker has stepped, and how many group steps that were."""
        row = self._workers + worker * _WORKER_WORDS
        return self.words[row + _WORK_US] / 1e6, self.words[row + _STEPS]

    def actor_totals(self, actor: int) -> tuple[float, int, int]:
        """Seconds that an actor has computed, its forward passes, and their rows."""
        row = self._actors + actor * _ACTOR_WORDS
        return (
            self.words[row + _BUSY_US] / 1e6,
            self.words[row + _FORWARDS],
            self.words[row + _ROWS],
        )

    # -- what a runner sees ------------------------------------------------------------------------

    def workers_of(self, actor: int) -> Sequence[int]:
        """See Exchange."""
        return self.layout.workers_of(actor)

    def actors_of(self, worker: int) -> Sequence[int]:
        """See Exchange."""
        return [worker % self.layout.num_actors]

    def worker_died(self, worker: int, reason: str) -> None:
        """See Exchange."""
        for group in self.layout.groups_of_worker(worker):
            self.words[self.row(group) + REASON] = REASONS.index(reason)
            # One that never said hello holds no slot: its successor need not wait.
            lost = self.words[self.row(group) + TURN] not in (EMPTY, HELLO)
            self.give_turn(group, LOST if lost else EMPTY)
        self.words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US] = 0

    def actor_died(self, actor: int) -> None:
        """See Exchange."""
        for worker in self.workers_of(actor):
            for group in self.layout.groups_of_worker(worker):
                self.give_turn(group, EMPTY)
            self.words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US] = 0
        self.words[self._actors + actor * _ACTOR_WORDS + _BEAT_US] = 0

    def late_workers(self, seconds: float) -> list[int]:
        """See Exchange."""
        return [w for w in range(self.layout.num_workers) if self._is_late(w, seconds)]

    def _is_late(self, worker: int, seconds: float) -> bool:
        # A worker steps one group after the other: what counts is that it gets on.
        now, words = micros(), self.words
        progress = words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US]
        for group in self.layout.groups_of_worker(worker):
            turn = words[self.row(group) + TURN]
            waited = now - max(progress, words[self.row(group) + SINCE_US])
            limit = seconds if turn in (ACT, BEGIN) else max(seconds, _START_SECONDS)
            if turn in (ACT, BEGIN, EMPTY) and waited > limit * 1e6:
                return True
        return False

    def late_actors(self, seconds: float) -> list[int]:
        """See Exchange."""
        now = micros()
        beats = [
            self.words[self._actors + actor * _ACTOR_WORDS + _BEAT_US]
            for actor in range(self.layout.num_actors)
        ]
        return [actor for actor, beat in enumerate(beats) if beat and now - beat > seconds * 1e6]


def micros() -> int:
    """The monotonic clock, the same in all processes."""
    return time.monotonic_ns() // 1000
