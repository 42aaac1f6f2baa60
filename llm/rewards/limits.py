"""Deadlines and rates for calls to what is slow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_PARTS = 10
_GRACE_SECONDS = 0.05
_END_SECONDS = 1.0


class Limits:
    """At most so many calls at a time, and so many started per second; 0: any number."""

    def __init__(self, concurrency: int, rate_per_second: float = 0.0) -> None:
        self._free = asyncio.Semaphore(concurrency)
        self._rate = rate_per_second
        self._next = 0.0

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """One call at a time of so many; waiting for a turn counts towards no deadline."""
        async with self._free:
            await self.turn()
            yield

    async def turn(self) -> None:
        if self._rate:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + 1.0 / self._rate
            await asyncio.sleep(start - now)


async def within(call: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of a call, which is cancelled after so many seconds; raises TimeoutError then.

    Unlike asyncio.timeout this never loses a result that is there already: where the event loop was
    held up, the deadline and the result are found at the same moment. Where all was stopped
    meanwhile (Ctrl-Z), that is one part of the deadline, whatever it took.
    """
    task = asyncio.ensure_future(call)
    try:
        for timeout in (*[seconds / _PARTS] * _PARTS, _GRACE_SECONDS):
            done, _ = await asyncio.wait({task}, timeout=timeout)
            if done:
                return task.result()
    finally:
        if not task.done():
            task.cancel()
            # What ignores its cancellation is left to itself.
            await asyncio.wait({task}, timeout=_END_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # looked at, so that asyncio does not report it
    raise TimeoutError(f"no result after {seconds:g} s")
