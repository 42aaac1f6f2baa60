"""Where environment workers and policy workers meet: a table in shared memory that says whose turn
each group of environments is, for each policy that plays in it.

Payloads never pass here: observations and actions lie in the queue's slots, which both sides map. A
word goes round

    HELLO -> BEGIN -> OBS -> ACT -> OBS -> ACT -> ...

HELLO: the environments are reset. BEGIN: the policy worker named a slot, the worker shall write
row 0. OBS: the observation of a row is there, the policy worker's turn. ACT: the action is there,
the environment worker's turn. Only the side whose turn it is writes, so no lock is needed. When a
worker died, a runner says so in another word (LOST): the policy worker discards the slot and sets
EMPTY, and a new worker begins with HELLO.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unirl.core.slot_table import REASONS

EMPTY, HELLO, BEGIN, OBS, ACT = range(5)
# Of a part. A word is written whole, and the turn always last. LOST: 0, or 1 + the reason's index.
TURN, SLOT, ROW, SINCE_US, SEED, LOST, _PART_WORDS = range(7)
# Of a group.
_STARTED_US, _WORK_US, _STEPS, _GROUP_WORDS = range(4)
# Of a worker.
_PROGRESS_US, _WORKER_WORDS = range(2)
# Of an actor.
_BEAT_US, _BUSY_US, _FORWARDS, _ROWS, _ACTOR_WORDS = range(5)
_START_SECONDS = 120.0
"""How long a worker may take to make and reset its environments."""


@dataclass(frozen=True)
class Layout:
    """Which groups of environments there are, and who decides for which part of them.

    Group g of worker w is number w * num_groups + g. Each group has a part for each policy: the
    rows (environments, or agents of them) that this policy decides for, in a slot of its queue.
    Part = group * num_policies + policy. Actors are numbered through: policy * num_actors + i, and
    the i-th of each policy decides for the workers i, i + num_actors, ...
    """

    num_workers: int
    num_groups: int
    num_actors: int = 1
    """Of each policy."""
    num_policies: int = 1

    @property
    def num_parts(self) -> int:
        """Parts of all groups of all workers."""
        return self.num_workers * self.num_groups * self.num_policies

    def groups_of(self, worker: int) -> list[int]:
        """Numbers of a worker's groups."""
        return [worker * self.num_groups + g for g in range(self.num_groups)]

    def parts_of_group(self, group: int) -> list[int]:
        """A group's parts, policy by policy."""
        return [group * self.num_policies + p for p in range(self.num_policies)]

    def parts_of_worker(self, worker: int) -> list[int]:
        """All parts that a worker steps."""
        return [part for group in self.groups_of(worker) for part in self.parts_of_group(group)]

    def parts_of_actor(self, actor: int) -> list[int]:
        """All parts that an actor decides for."""
        policy = actor // self.num_actors
        return [
            group * self.num_policies + policy
            for worker in self.workers_of(actor)
            for group in self.groups_of(worker)
        ]

    def workers_of(self, actor: int) -> list[int]:
        """Workers that an actor decides for."""
        return list(range(actor % self.num_actors, self.num_workers, self.num_actors))

    def actors_of(self, worker: int) -> list[int]:
        """The actors that decide for a worker, policy by policy."""
        return [p * self.num_actors + worker % self.num_actors for p in range(self.num_policies)]

    def worker_of(self, part: int) -> int:
        """The worker that steps a part."""
        return part // self.num_policies // self.num_groups


class Bell(Protocol):
    """Wakes one sleeper: a ring stays until it is heard."""

    def ring(self) -> None:
        """Wake the sleeper, now or when it next waits."""

    def wait(self, seconds: float) -> None:
        """Sleep until a ring, at most `seconds`."""


def exchange_words(layout: Layout) -> int:
    """How many int64 words the table of such an exchange has."""
    return (
        layout.num_parts * _PART_WORDS
        + layout.num_workers * layout.num_groups * _GROUP_WORDS
        + layout.num_workers * _WORKER_WORDS
        + layout.num_policies * layout.num_actors * _ACTOR_WORDS
    )


class Exchange:
    """The table of turns; unirl.transports.shared brings the memory.

    words: `exchange_words(...)` int64 words, zeroed by the creator. bells: one per worker; actors
    listen to those of their queues.
    """

    def __init__(self, layout: Layout, words: memoryview, bells: Sequence[Bell]) -> None:
        self.layout, self.words, self._bells = layout, words, bells
        self._groups = layout.num_parts * _PART_WORDS
        self._workers = self._groups + layout.num_workers * layout.num_groups * _GROUP_WORDS
        self._actors = self._workers + layout.num_workers * _WORKER_WORDS

    def open(self) -> None:
        """The creator's, before anyone else sees it: the workers' time to start begins."""
        for part in range(self.layout.num_parts):
            self.words[self.row(part) + SINCE_US] = micros()

    def row(self, part: int) -> int:
        """Where a part's words begin."""
        return part * _PART_WORDS

    def give_turn(self, part: int, turn: int) -> None:
        """Hand the part over, with the time."""
        row = self.row(part)
        self.words[row + SINCE_US] = micros()
        self.words[row + TURN] = turn

    def clear(self, part: int) -> None:
        """Nothing of a dead worker is left in this part: a new one may say hello."""
        self.give_turn(part, EMPTY)
        self.words[self.row(part) + LOST] = 0

    def ring_worker(self, worker: int) -> None:
        """Wake an environment worker, now or when it next waits."""
        self._bells[worker].ring()

    def wait_as_worker(self, worker: int, seconds: float) -> None:
        """Sleep until this worker's bell rings, at most `seconds`."""
        self._bells[worker].wait(seconds)

    # -- what each side tells of itself ------------------------------------------------------------

    def begin_work(self, worker: int, group: int) -> None:
        """A worker starts to step one of its groups."""
        now = micros()
        self.words[self._groups + group * _GROUP_WORDS + _STARTED_US] = now
        self.words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US] = now

    def end_work(self, worker: int, group: int) -> None:
        """A worker has stepped one of its groups."""
        row, now, words = self._groups + group * _GROUP_WORDS, micros(), self.words
        words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US] = now
        words[row + _WORK_US] += now - words[row + _STARTED_US]
        words[row + _STEPS] += 1
        words[row + _STARTED_US] = 0

    def beat(self, actor: int) -> None:
        """An actor is alive."""
        self.words[self._actors + actor * _ACTOR_WORDS + _BEAT_US] = micros()

    def count_forward(self, actor: int, started_us: int, num_rows: int) -> None:
        """An actor has decided for so many rows."""
        row = self._actors + actor * _ACTOR_WORDS
        self.words[row + _BUSY_US] += micros() - started_us
        self.words[row + _FORWARDS] += 1
        self.words[row + _ROWS] += num_rows

    def group_totals(self, group: int) -> tuple[float, int]:
        """Seconds that a group has been stepped, and how often."""
        row = self._groups + group * _GROUP_WORDS
        return self.words[row + _WORK_US] / 1e6, self.words[row + _STEPS]

    def actor_totals(self, actor: int) -> tuple[float, int, int]:
        """Seconds that an actor has computed, its forward passes, and their rows."""
        row = self._actors + actor * _ACTOR_WORDS
        return (
            self.words[row + _BUSY_US] / 1e6,
            self.words[row + _FORWARDS],
            self.words[row + _ROWS],
        )

    # -- what a runner asks and tells: of deaths when the process is gone for good, before it starts
    # another in its place

    def worker_died(self, worker: int, reason: str) -> None:
        """Have its unfinished samples discarded for this reason, by the actors that hold them."""
        for part in self.layout.parts_of_worker(worker):
            # Not the turn: the policy worker may be about to change that.
            self.words[self.row(part) + SINCE_US] = micros()
            self.words[self.row(part) + LOST] = 1 + REASONS.index(reason)
        for group in self.layout.groups_of(worker):
            self.words[self._groups + group * _GROUP_WORDS + _STARTED_US] = 0
        self.words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US] = 0

    def actor_died(self, actor: int) -> None:
        """Forget its unfinished samples; its workers are dead too."""
        own = set(self.layout.parts_of_actor(actor))
        for worker in self.layout.workers_of(actor):
            self.worker_died(worker, "actor_died")  # to the actors of other policies it has
            for part in own & set(self.layout.parts_of_worker(worker)):
                self.clear(part)
        self.words[self._actors + actor * _ACTOR_WORDS + _BEAT_US] = 0

    def late_workers(self, seconds: float) -> list[int]:
        """Workers that have owed an answer for longer than this."""
        return [w for w in range(self.layout.num_workers) if self._is_late(w, seconds)]

    def _is_late(self, worker: int, seconds: float) -> bool:
        # A group may wait until the worker has stepped others: what counts is that it gets on.
        now, words = micros(), self.words
        progress = words[self._workers + worker * _WORKER_WORDS + _PROGRESS_US]
        for group in self.layout.groups_of(worker):
            started = words[self._groups + group * _GROUP_WORDS + _STARTED_US]
            rows = [self.row(part) for part in self.layout.parts_of_group(group)]
            # Whatever stands there still, a worker that follows a dead one owes nothing yet.
            turns = {EMPTY if words[row + LOST] else words[row + TURN] for row in rows}
            since = max(words[row + SINCE_US] for row in rows)
            owes = turns == {ACT} or BEGIN in turns
            limit = seconds if owes or started else max(seconds, _START_SECONDS)
            waited = now - (started or max(progress, since))
            if (owes or started or EMPTY in turns) and waited > limit * 1e6:
                return True
        return False

    def late_actors(self, seconds: float) -> list[int]:
        """Actors that have shown no sign of life for longer than this."""
        now = micros()
        beats = [
            self.words[self._actors + actor * _ACTOR_WORDS + _BEAT_US]
            for actor in range(self.layout.num_policies * self.layout.num_actors)
        ]
        return [actor for actor, beat in enumerate(beats) if beat and now - beat > seconds * 1e6]


def micros() -> int:
    """The monotonic clock, the same in all processes."""
    return time.monotonic_ns() // 1000
