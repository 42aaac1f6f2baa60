"""A thread that serves many sockets: it sleeps until one of them, or another thread, has work."""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from unirl.transports.events import FdEvent

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class IoLoop:
    """Calls back in one thread, so what belongs to it needs no lock. tick: called several times a
    second, with the seconds that the thread could not run though it wanted to.
    """

    def __init__(self, name: str, tick: Callable[[float], None]) -> None:
        self._selector, self._tick = selectors.DefaultSelector(), tick
        self._calls: deque[Callable[[], None]] = deque()
        self._wake, self._closing = FdEvent(), False
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake.clear)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call(self, work: Callable[[], None]) -> None:
        """Have this done by the thread soon; from any thread."""
        self._calls.append(work)
        self._wake.set()

    def ask(self, work: Callable[[], Any], seconds: float = 30.0) -> Any:
        """Have this done by the thread, and wait for its result; what it raises is raised. None
        where the thread has ended, or has not come to it by then.
        """
        if threading.current_thread() is self._thread:
            return work()
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self.call(run)
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            if wait([done], TICK_SECONDS).done:
                return done.result()
        return done.result() if done.done() else None

    def watch(self, what: Any, on_readable: Callable[[], None]) -> None:
        """Call back when it is readable. By the thread itself, as the next two."""
        self._selector.register(what, selectors.EVENT_READ, on_readable)

    def set_writing(self, what: Any, writing: bool) -> None:
        """Whether to call back when it is writable, too."""
        with contextlib.suppress(KeyError, ValueError):
            key = self._selector.get_key(what)
            wanted = _BOTH if writing else selectors.EVENT_READ
            if key.events != wanted:
                self._selector.modify(what, wanted, key.data)

    def forget(self, what: Any) -> None:
        """Watch it no longer; idempotent."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(what)

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        ticked = time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(TICK_SECONDS):
                self._guard(key.data)
            while self._calls:
                self._guard(self._calls.popleft())
            now = time.monotonic()
            if now - ticked >= TICK_SECONDS:
                late, ticked = now - ticked - 2 * TICK_SECONDS, now
                self._guard(partial(self._tick, max(0.0, late)))
        self._selector.close()

    @staticmethod
    def _guard(work: Callable[[], None]) -> None:
        # One node's trouble must not end the thread that serves all.
        try:
            work()
        except Exception:
            log.exception("the remote transport met an error")
