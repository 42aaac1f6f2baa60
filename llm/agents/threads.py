"""Threads for code that is not async: of a tool, a simulator, a user's environment.

They are daemons that nobody joins, as those of concurrent.futures are joined when the interpreter
ends: a call that hangs past its deadline costs one thread, and never the end of the run.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class ForeignExit(Exception):
    """Code of others raised SystemExit, which would end the event loop."""


class OwnThread:
    """One thread for one object: its calls never overlap, and all come from the same thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._jobs.put((function, loop, future))
        return await future

    def close(self) -> None:
        """The thread ends when its call has ended, if it ever does."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, loop, future = job
            result: Any = None
            error: Exception | None = None
            try:
                result = function()
            except StopIteration as stop:
                error = RuntimeError(f"StopIteration: {stop}")  # a future cannot hold one
            except Exception as failed:
                error = failed
            except BaseException as failed:
                error = ForeignExit(f"{type(failed).__name__}: {failed}")
            try:
                loop.call_soon_threadsafe(_answer, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits


class Threads:
    """As many as there are calls at a time; idle ones are used again."""

    def __init__(self) -> None:
        self._idle: list[OwnThread] = []

    async def call(self, function: Callable[[], Any]) -> Any:
        thread = self._idle.pop() if self._idle else OwnThread()
        try:
            result = await thread.call(function)
        except asyncio.CancelledError:
            thread.close()
            raise
        except BaseException:
            self._idle.append(thread)
            raise
        self._idle.append(thread)
        return result

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _answer(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
