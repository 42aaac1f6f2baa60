"""The episodes of a group as they end: when it is whole, and which are waited for no longer.

A group lingers when a quorum of its episodes has ended. Where generation never pauses the rest is
cancelled at the last moment at which the learner can still take the group before it is too old;
and, of the group that has lingered for longest, when so many linger that the engine has little else
to do. So a slow episode neither makes its group stale nor stops the learner.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unirl.errors import DiscardSlot
from unirl.llm.agents.episode import Episode
from unirl.llm.outcome import ABSENT, Score

_LOOK_SECONDS = 0.05
"""Between two looks of a group that lingers at the others, and at the policy's version."""
_CANCEL_SECONDS = 0.5
"""That a group waits until cancelled episodes have ended."""
_MOST_LINGERING = 0.75
"""Of an actor's slots."""
CUT = -1
"""Place of an episode that its group waited for no longer."""
NO_SCORE = Score(outcome=ABSENT, why="its group waited for it no longer")
"""What each reward says of such an episode."""


class Attempt(NamedTuple):
    """One of a group's episodes, when it has ended."""

    episode: Episode
    place: int
    """In its group; CUT: without one."""
    retried: int


@dataclass(frozen=True)
class Haste:
    """Why groups do not wait for all of their episodes. Both are this actor's part, where there are
    several.
    """

    max_staleness: int
    """Updates that a group may be old when it is learned from."""
    batch_size: float
    """Groups of an update."""

    @property
    def num_slots(self) -> float:
        """Groups that are in flight, or wait to be learned from."""
        return (self.max_staleness + 1) * self.batch_size


@dataclass(eq=False)
class _Group:
    """A group in flight."""

    cut: asyncio.Event
    """It waits no longer."""
    whole: list[Attempt] = field(default_factory=list)
    oldest: float = math.inf
    """Version of the first weights that drew a token of these."""

    def add(self, attempt: Attempt) -> None:
        """One more episode has ended."""
        self.whole.append(attempt)
        self.oldest = min((self.oldest, *attempt.episode.versions))


class Gathering:
    """All groups of an actor. size: episodes of a group; oversample: that are begun beyond these.
    quorum: the share of a group at which it lingers. version: the policy's newest one. haste: None,
    all episodes are waited for.
    """

    def __init__(
        self,
        size: int,
        oversample: int,
        quorum: float,
        version: Callable[[], int],
        haste: Haste | None = None,
    ) -> None:
        self._size, self._oversample, self._version, self._haste = size, oversample, version, haste
        # A group of one has no baseline.
        self._enough = min(size, max(2, math.ceil(quorum * size)))
        self._lingering: list[_Group] = []
        """For longest first."""
        self._tails: set[asyncio.Task[Any]] = set()
        """Cancelled episodes that have not let go yet."""
        self._num_groups = 0

    async def group(
        self, attempt: Callable[[int], Coroutine[None, None, Attempt]]
    ) -> tuple[list[Attempt], int]:
        """The first whole episodes, in the order in which they were begun, then those that were
        cut: "aborted", and without turns; and how many were cancelled. attempt: of a place. Raises
        DiscardSlot where more failed by themselves than there are episodes beyond a group's size.
        """
        group, num_failed = _Group(asyncio.Event()), 0
        places = range(self._size + self._oversample)
        begun = {asyncio.ensure_future(attempt(place)) for place in places}
        waiting = set(begun)
        cut = asyncio.ensure_future(group.cut.wait())
        self._num_groups += 1
        try:
            while len(group.whole) < self._size and not group.cut.is_set():
                ended, _ = await asyncio.wait(
                    {*waiting, cut},
                    timeout=_LOOK_SECONDS if self._lingering else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                done = waiting & ended
                waiting -= done
                for each in sorted((each.result() for each in done), key=lambda each: each.place):
                    if each.episode.ending == "infrastructure":
                        num_failed += 1
                    else:
                        group.add(each)
                if num_failed > self._oversample:
                    raise DiscardSlot("infrastructure")
                if self._enough <= len(group.whole) < self._size and group not in self._lingering:
                    self._lingering.append(group)
                self._look()
            found = sorted(group.whole[: self._size], key=lambda each: each.place)
            num_cancelled = len(waiting) + len(group.whole) - len(found)
            return found + [_cut() for _ in range(self._size - len(found))], num_cancelled
        finally:
            self._num_groups -= 1
            if group in self._lingering:
                self._lingering.remove(group)
            self._look()
            await self.cancel({*begun, cut})

    def _look(self) -> None:
        """Cut what cannot wait for longer."""
        if self._haste is None:
            return
        size, oldest = self._haste.batch_size, self._version() - self._haste.max_staleness
        # What is not in flight is committed, or about to be: the batch that the learner waits for,
        # or the one that it has and the next one.
        num_ready = max(0.0, self._haste.num_slots - self._num_groups)
        num_batches = 1 if num_ready < size else 2
        num_free = num_batches * size - num_ready
        last = [each for each in self._lingering if each.oldest < oldest + num_batches]
        # Others would take the places of these, and they would be too old for the next ones.
        if self._num_groups > len(last) >= num_free:
            for each in last[: math.ceil(num_free) if num_free > 0 else None]:
                each.cut.set()
        left = [each for each in self._lingering if not each.cut.is_set()]
        if len(left) > _MOST_LINGERING * self._haste.num_slots:
            left[0].cut.set()

    async def cancel(self, tail: set[asyncio.Task[Any]] | None = None) -> None:
        """End these episodes, or all that are left. Who cancels them does not wait for tools and
        worlds that are slow to let go.
        """
        tail = set(self._tails) if tail is None else tail
        for each in tail:
            each.cancel()
            each.add_done_callback(_look_at)
        self._tails |= tail
        if tail:
            await asyncio.wait(tail, timeout=_CANCEL_SECONDS)
        self._tails = {each for each in self._tails if not each.done()}


def _cut() -> Attempt:
    return Attempt(Episode(ending="aborted", why=NO_SCORE.why), CUT, 0)


def _look_at(task: asyncio.Task[Any]) -> None:
    """So that what went wrong in a cancelled episode is not reported as never looked at."""
    if not task.cancelled():
        task.exception()
