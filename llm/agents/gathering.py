"""The episodes of a group as they end: when it is whole, and which are waited for no longer.

A group lingers when a quorum of its episodes has ended. Where generation never pauses the rest is
cancelled when the group would get too old to be learned from; and, of the group that has lingered
for longest, when so many linger that the engine has little else to do. So a slow episode neither
makes its group stale nor stops the learner.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import NamedTuple

from unirl.errors import DiscardSlot
from unirl.llm.agents.episode import Episode
from unirl.llm.outcome import ABSENT, Score

_LOOK_SECONDS = 0.05
"""Between two looks of a group that lingers at the others, and at the policy's version."""
_CANCEL_SECONDS = 0.5
"""That a group waits until cancelled episodes have ended."""
_MOST_LINGERING = 0.75
"""Of an actor's slots."""
CUT = Score(outcome=ABSENT, why="the rest of its group waited for it no longer")
"""What each reward says of an episode that was cancelled for the others' sake."""


class Attempt(NamedTuple):
    """One of a group's episodes, when it has ended."""

    episode: Episode
    place: int
    retried: int


@dataclass(frozen=True)
class Haste:
    """Why groups do not wait for all of their episodes."""

    max_staleness: int
    """Updates that a group may be old when it is learned from."""
    num_slots: int
    """Groups that the actor has in flight, at most."""


@dataclass(eq=False)
class _Group:
    """A group in flight."""

    whole: list[Attempt] = field(default_factory=list)
    oldest: float = math.inf
    """Version of the first weights that drew a token of these."""
    is_cut: bool = False
    """It waits no longer."""

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
        self._tails: set[asyncio.Task[Attempt]] = set()
        """Cancelled episodes that have not let go yet."""
        self._num_groups = 0

    async def group(
        self, attempt: Callable[[int], Coroutine[None, None, Attempt]]
    ) -> tuple[list[Attempt], int]:
        """The first whole episodes, in the order in which they were begun, then those that were
        cut: "aborted", and without turns; and how many were cancelled. attempt: of a place. Raises
        DiscardSlot where more failed by themselves than there are episodes beyond a group's size.
        """
        group, num_failed = _Group(), 0
        whole = group.whole
        waiting = {
            asyncio.ensure_future(attempt(place)) for place in range(self._size + self._oversample)
        }
        self._num_groups += 1
        try:
            while len(whole) < self._size and not group.is_cut:
                lingers = self._haste is not None and len(whole) >= self._enough
                done, waiting = await asyncio.wait(
                    waiting,
                    timeout=_LOOK_SECONDS if lingers else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for each in sorted((each.result() for each in done), key=lambda each: each.place):
                    if each.episode.ending == "infrastructure":
                        num_failed += 1
                    else:
                        group.add(each)
                if num_failed > self._oversample:
                    raise DiscardSlot("infrastructure")
                if self._haste is not None and len(whole) >= self._enough:
                    self._linger(group, self._haste)
            found = sorted(whole[: self._size], key=lambda each: each.place)
            num_cancelled = len(waiting) + len(whole) - len(found)
            return found + [_cut() for _ in range(self._size - len(found))], num_cancelled
        finally:
            self._num_groups -= 1
            if group in self._lingering:
                self._lingering.remove(group)
            await self.cancel(waiting)

    def _linger(self, group: _Group, haste: Haste) -> None:
        """Cut this group where it gets too old, and the first to linger where too many do."""
        if group not in self._lingering:
            self._lingering.append(group)
        # A learner that waits learns at once from what is committed; where it has groups to learn
        # from, and slots are ready instead of in flight, one update passes before.
        is_awaited = self._num_groups > _MOST_LINGERING * haste.num_slots
        limit = haste.max_staleness if is_awaited else max(1, haste.max_staleness - 1)
        group.is_cut |= self._version() - group.oldest >= limit
        left = [each for each in self._lingering if not each.is_cut]
        if len(left) > _MOST_LINGERING * haste.num_slots:
            left[0].is_cut = True

    async def cancel(self, tail: set[asyncio.Task[Attempt]] | None = None) -> None:
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
    return Attempt(Episode(ending="aborted", why=CUT.why), -1, 0)


def _look_at(task: asyncio.Task[Attempt]) -> None:
    """So that what went wrong in a cancelled episode is not reported as never looked at."""
    if not task.cancelled():
        task.exception()
