"""A blocking call in a daemon thread: neither the end of an event loop nor that of the process
waits for it, as both do for threads of an executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DaemonCall(Generic[T]):
    """Made on an event loop, begins at once. dispose: takes a result that comes too late; in a
    thread as well.
    """

    def __init__(
        self, work: Callable[[], T], dispose: Callable[[T], None] = lambda result: None
    ) -> None:
        self._work, self._dispose = work, dispose
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.is_abandoned = False
        """Whether the result is not awaited any more: the work may look, and end early."""
        self._results: list[T] = []
        self.future: asyncio.Future[T] = self._loop.create_future()
        """The call's result or error, unless it was abandoned."""
        threading.Thread(target=self._run, name="daemon-call", daemon=True).start()

    def abandon(self) -> None:
        """Await it no more: a result is disposed of, whenever it comes."""
        with self._lock:
            self.is_abandoned = True
            late, self._results = self._results, []
        if late:
            threading.Thread(target=self._dispose, args=late, daemon=True).start()

    def _run(self) -> None:
        error: BaseException | None = None
        results: list[T] = []
        try:
            results = [self._work()]
        except BaseException as caught:
            error = caught
        with self._lock:
            is_late = self.is_abandoned
            if not is_late:
                self._results = results
        if is_late:
            for result in results:
                self._dispose(result)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if self.is_abandoned or self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self._results[0])
