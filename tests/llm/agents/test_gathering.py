"""Which episodes of a group are waited for, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.agents.gathering import Attempt, Gathering, Haste
from unirl.llm.engine import Completion

SIZE = 4
DRAWN = Turn(-1, (1,), Completion((2,), (-1.0,), (5,), "stop"))
"""By weights of version 5."""


class Policy:
    version = 5


class Slow:
    """Attempts of which the last `number` end when they are let."""

    def __init__(self, number: int = 1) -> None:
        self.may_end, self._number = asyncio.Event(), number

    async def __call__(self, place: int) -> Attempt:
        if place >= SIZE - self._number:
            await self.may_end.wait()
        return Attempt(Episode([DRAWN]), place, 0)


def gathering(policy: Policy, haste: Haste | None, quorum: float = 0.5) -> Gathering:
    return Gathering(SIZE, 0, quorum, lambda: policy.version, haste)


def endings(found: list[Attempt]) -> list[str]:
    return [each.episode.ending for each in found]


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))


async def is_waiting(group: Awaitable[Any]) -> bool:
    """For longer than a group takes to look around."""
    done, _ = await asyncio.wait({asyncio.ensure_future(group)}, timeout=0.15)
    return not done


def begin(groups: Gathering, slow: Slow) -> asyncio.Future[tuple[list[Attempt], int]]:
    return asyncio.ensure_future(groups.group(slow))


def test_a_group_is_cut_when_the_learner_can_take_it_no_later() -> None:
    async def work() -> None:
        policy, slow = Policy(), Slow()
        groups = gathering(policy, Haste(max_staleness=3, batch_size=1))
        # As many as there are slots, so that the learner has nothing and waits.
        others = [begin(groups, Slow(SIZE)) for _ in range(3)]
        group = begin(groups, slow)
        for version in (5, 6, 7):
            policy.version = version
            assert await is_waiting(group)
        policy.version = 8
        found, cancelled = await group
        assert endings(found) == ["stop"] * 3 + ["aborted"] and cancelled == 1
        assert not any(each.done() for each in others)  # which have no quorum
        for each in others:
            each.cancel()

    run(work)


def test_it_is_cut_one_update_earlier_where_the_learner_has_a_batch_already() -> None:
    async def work() -> None:
        policy = Policy()
        groups = gathering(policy, Haste(max_staleness=3, batch_size=3.5))
        group = begin(groups, Slow())
        assert await is_waiting(group)
        policy.version = 7
        assert await is_waiting(group)  # nobody takes its place
        other = begin(groups, Slow(SIZE))
        assert endings((await group)[0])[-1] == "aborted"
        other.cancel()

    run(work)


def test_without_a_quorum_a_group_is_never_cut() -> None:
    async def work() -> None:
        policy, slow = Policy(), Slow(3)
        group = begin(gathering(policy, Haste(max_staleness=1, batch_size=1)), slow)
        policy.version = 50
        assert await is_waiting(group)
        slow.may_end.set()
        assert endings((await group)[0]) == ["stop"] * SIZE

    run(work)


def test_without_haste_all_episodes_are_waited_for() -> None:
    async def work() -> None:
        policy, slow = Policy(), Slow()
        group = begin(gathering(policy, None), slow)
        policy.version = 50
        assert await is_waiting(group)
        slow.may_end.set()
        found, cancelled = await group
        assert [each.place for each in found] == [0, 1, 2, 3] and cancelled == 0

    run(work)


def test_when_most_groups_linger_the_first_of_them_is_cut() -> None:
    async def work() -> None:
        groups = gathering(Policy(), Haste(max_staleness=3, batch_size=2))
        eight = []
        for _ in range(8):
            eight.append(begin(groups, Slow()))
            await asyncio.sleep(0.01)
        await asyncio.wait(eight[:2])
        assert await is_waiting(eight[-1])
        assert [each.done() for each in eight] == [True, True] + [False] * 6
        for each in eight:
            each.cancel()

    run(work)


def test_an_episode_that_ends_before_its_group_is_cut_counts() -> None:
    async def work() -> None:
        policy, slow = Policy(), Slow()
        groups = gathering(policy, Haste(max_staleness=3, batch_size=1))
        others = [begin(groups, Slow(SIZE)) for _ in range(3)]
        group = begin(groups, slow)
        assert await is_waiting(group)
        slow.may_end.set()
        assert endings((await group)[0]) == ["stop"] * SIZE
        for each in others:
            each.cancel()

    run(work)
