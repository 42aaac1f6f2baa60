"""How many members a pool has, between its fewest and its most: as many as the learner can use.

What limits a run shows in who waits. A learner that waits while the members work wants more of
them; members that wait for slots while the learner works are too many. A decision needs several
stretches of time that agree, and what a size was found to be (too few, or of no more use than
fewer) is remembered: a pool stays where it belongs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from unirl.core.pool import Pool
from unirl.errors import UniRLError
from unirl.run_events import event
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan

log = logging.getLogger(__name__)

_LEARNER_WAITS, _LEARNER_BUSY = 0.10, 0.03
"""Shares of its time: from the first on it wants more, up to the second it has enough."""
_MEMBERS_IDLE = 1.25
"""So many members' worth of time must be spent waiting before there are too many."""
_SPARE = 1.1
"""Members to keep, beside the time that they work."""
_WORTH = 0.3
"""What more members must bring at least, as a share of what they would if nothing held them up."""
_AGREE_TO_GROW, _AGREE_TO_SHRINK = 2, 3
"""Stretches in a row that must say the same."""
_REMEMBER_SECONDS = 900.0
_PATIENCE = 6
"""Stretches that members may take to start, or to leave."""
_MIN_UPDATES = 8
"""Of a stretch: fewer say nothing."""


@dataclass(frozen=True)
class Rates:
    """What was seen of a pool in one stretch of time."""

    members: int
    learned: float
    """Its slots that were learned, per second."""
    learner_waits: float
    """As a share of the time."""
    members_wait: float
    """As a share of the members' time."""

    def describe(self) -> str:
        return (
            f"the learner waited {self.learner_waits:.0%} of the time, members "
            f"{self.members_wait:.0%} of theirs; {self.learned:.3g} slots/s were learned"
        )


class SizeRule:
    """Decides for one pool, from one stretch after the other."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high
        self._before: Rates | None = None
        """Where there are more members now than then: what that was like."""
        self._too_few, self._useless = _Memory(), _Memory()
        self._votes = 0
        """Stretches in a row that want more; negative: fewer."""

    def decide(self, seen: Rates, now: float) -> tuple[int, str] | None:
        """How many there shall be, and why; None: as many as there are."""
        before, self._before = self._before, None
        if before is not None and self._brought_little(before, seen):
            self._useless.note(seen.members, now)
            self._too_few.forget()
            self._votes = 0
            return before.members, f"{seen.members} brought little: {seen.describe()}"
        wanted = self._wanted(seen, now)
        self._votes = _count_votes(self._votes, wanted - seen.members)
        if self._votes >= _AGREE_TO_GROW:
            self._before = seen
            self._too_few.note(seen.members, now)
        elif self._votes > -_AGREE_TO_SHRINK:
            return None
        self._votes = 0
        return wanted, seen.describe()

    def refuse(self, members: int, now: float) -> None:
        """There is no place for so many; for a minute, in which there may come to be one."""
        self._useless.note(members, now - _REMEMBER_SECONDS + 60.0)
        self._before = None

    def _brought_little(self, before: Rates, seen: Rates) -> bool:
        expected = seen.members / before.members - 1
        gained = seen.learned / max(before.learned, 1e-9) - 1
        return seen.learner_waits > _LEARNER_WAITS and gained < _WORTH * expected

    def _wanted(self, seen: Rates, now: float) -> int:
        number = seen.members
        if number < self._low or number > self._high:
            return min(max(number, self._low), self._high)
        if seen.learner_waits > _LEARNER_WAITS and seen.members_wait < 0.5:
            # Production has to grow by what the learner could consume while it waits.
            wanted = math.ceil(number / max(0.5, 1 - seen.learner_waits) - 0.1)
            most = min(self._high, self._useless.get(now, self._high + 1) - 1)
            return max(number, min(max(wanted, number + 1), most))
        is_idle = seen.members_wait * number >= _MEMBERS_IDLE
        if seen.learner_waits < _LEARNER_BUSY and is_idle:
            wanted = math.ceil(number * (1 - seen.members_wait) * _SPARE)
            least = max(self._low, self._too_few.get(now, 0) + 1)
            return min(number, max(wanted, least))
        return number


class _Memory:
    """A size that something was found out about, for as long as that may hold."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._at = 0.0

    def note(self, value: int, now: float) -> None:
        self._value, self._at = value, now

    def forget(self) -> None:
        self._value = None

    def get(self, now: float, default: int) -> int:
        if self._value is None or now - self._at > _REMEMBER_SECONDS:
            return default
        return self._value


def _count_votes(votes: int, sign: int) -> int:
    if sign > 0:
        return max(votes, 0) + 1
    return min(votes, 0) - 1 if sign < 0 else 0


class ElasticPool:
    """Hook of the pool's learner. resize: changes the number of members, or raises UniRLError."""

    def __init__(self, plan: Plan, pool: Pool, resize: Callable[[Pool, int], None]) -> None:
        self.pool, self._resize = pool, resize
        self._number = plan.pools_of(plan.learners[plan.learners_of(pool)[0]]).index(pool)
        self._rule, self._seconds = SizeRule(*pool.bounds), plan.runner.scale_seconds
        self.is_pinned = False
        """People have said how many there shall be."""
        self._expected, self._patience = 0, 0
        """How many were asked for, and for how many stretches they may take to be there."""
        self._begin(time.monotonic())

    def _begin(self, now: float) -> None:
        self._since, self._updates, self._slots = now, 0, 0
        self._learner_waited = self._members_waited = self._members_worked = 0.0

    def after_update(self, loop: TrainLoop) -> None:
        batch, now = loop.newest_batch, time.monotonic()
        if batch is None:
            return
        own = [slot for slot in batch.slots if slot.pool == self._number]
        self._updates += 1
        self._slots += len(own)
        self._learner_waited += batch.wait_seconds
        self._members_waited += sum(slot.wait_seconds for slot in own)
        self._members_worked += sum(slot.work_seconds for slot in own)
        if now - self._since < self._seconds or self._updates < _MIN_UPDATES:
            return
        members = sum(each.pool == self._number for each in loop.queue.members())
        loop.metrics.last(f"pools/{self.pool.name}/members", members)
        if self._patience:
            # What was seen is of another size, or of members that were still starting.
            self._patience = 0 if members == self._expected else self._patience - 1
        elif members and not self.is_pinned:
            self._decide(members, now)
        self._begin(now)

    def _decide(self, members: int, now: float) -> None:
        seconds, busy = now - self._since, self._members_waited + self._members_worked
        seen = Rates(
            members,
            self._slots / seconds,
            min(1.0, self._learner_waited / seconds),
            self._members_waited / busy if busy else 0.0,
        )
        decision = self._rule.decide(seen, now)
        if decision is None:
            return
        wanted, why = decision
        try:
            self._resize(self.pool, wanted)
        except UniRLError as error:
            log.warning("pool %s stays at %d members: %s", self.pool.name, members, error)
            self._rule.refuse(wanted, now)
            return
        about = event("scaled", pool=self.pool.name, size=wanted, cause=why)
        text = "pool %s: %d -> %d members: %s"
        log.info(text, self.pool.name, members, wanted, why, extra=about)
        self._expected, self._patience = wanted, _PATIENCE

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""


def elastic_pools(
    plan: Plan, learner: int, resize: Callable[[Pool, int], None]
) -> list[ElasticPool]:
    """Of the pools that feed this learner alone, those that may grow and shrink."""
    return [
        ElasticPool(plan, pool, resize)
        for pool in plan.pools
        if plan.learners_of(pool) == [learner] and pool.bounds[0] < pool.bounds[1]
    ]
