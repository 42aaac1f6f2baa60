"""A rollout function at work on a group, through interruptions.

An interrupted engine hands back what it has so far. The function does not see that: its call of
`Rollout.generate` lasts until the group is continued, and so do the tools and worlds that it holds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from unirl.llm.engine import Completion, Request


class FunctionRun:
    """It begins with the first `result`. Everything is on one event loop."""

    def __init__(self, begin: Callable[[], Awaitable[list[Completion]]]) -> None:
        self._begin = begin
        self._work: asyncio.Future[list[Completion]] | None = None
        self._may_run, self._halted = asyncio.Event(), asyncio.Event()
        self._round = 0
        self.oldest: float = math.inf
        """Version of the first weights that drew a token of the group."""

    async def result(self) -> list[Completion] | None:
        """What the function returned; None: it was halted, and the next call continues it."""
        self._halted.clear()
        self._may_run.set()
        if self._work is None:
            self._work = asyncio.ensure_future(self._begin())
        halted = asyncio.ensure_future(self._halted.wait())
        try:
            either: set[asyncio.Future[Any]] = {self._work, halted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            halted.cancel()
        return self._work.result() if self._work.done() else None

    async def generate(
        self, draw: Callable[[Request], Awaitable[Completion]], request: Request
    ) -> Completion:
        """The whole completion, whatever interrupts it. draw: the engine's."""
        while True:
            await self._may_run.wait()
            number = self._round
            found = await draw(request)
            self.oldest = min((self.oldest, *found.drawn_versions))
            if found.finish != "aborted":
                return found
            request = replace(request, partial=found)
            if number == self._round:  # the engine was interrupted by another way
                self.halt()

    def halt(self) -> None:
        """Nothing more is drawn until the next `result`."""
        self._round += 1
        self._may_run.clear()
        self._halted.set()

    def cancel(self) -> None:
        """End the function where it is; idempotent."""
        if self._work is not None:
            self._work.cancel()


class FunctionRuns:
    """What an own function is at, interrupted or not, by number of a group's prompt."""

    def __init__(self) -> None:
        self._runs: dict[int, FunctionRun] = {}

    async def result(
        self, number: int, begin: Callable[[], FunctionRun], oldest: int
    ) -> list[Completion] | None:
        """What the function returned for this prompt; None: it was halted, and is continued by the
        next call, unless older weights than `oldest` have drawn for it: then it begins again.
        """
        run = self._runs.get(number)
        if run is not None and run.oldest < oldest:
            run.cancel()
            run = None
        run = self._runs[number] = run or begin()
        try:
            found = await run.result()
        except BaseException:  # it is over, or is not waited for any more
            self._runs.pop(number, None)
            raise
        if found is not None:
            del self._runs[number]
        return found

    def halt(self) -> None:
        """All of them."""
        for run in self._runs.values():
            run.halt()

    def cancel(self) -> None:
        """End all of them; idempotent."""
        for run in self._runs.values():
            run.cancel()
        self._runs.clear()
