"""Events that wake a thread or process that sleeps, whichever of the run's processes sets them."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

from unirl.core.queue import Event

LOOK_AGAIN_SECONDS = 0.1
"""A lost notification must never become a hang: every sleeper looks again after this long."""
_ONE = (1).to_bytes(8, sys.byteorder)
T = TypeVar("T")


class FdEvent:
    """See unirl.core.queue.Event. A descriptor that any process of the run may hold."""

    def __init__(self) -> None:
        # An eventfd is one descriptor instead of two; a pipe is there on every system.
        if hasattr(os, "eventfd"):
            self._reader = self._writer = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self._reader, self._writer = os.pipe()
        self._prepare()

    def _prepare(self) -> None:
        for fd in {self._reader, self._writer}:
            weakref.finalize(self, os.close, fd)
            os.set_blocking(fd, False)

    def __getstate__(self) -> dict[str, Any]:
        if self._reader == self._writer:
            return {"both": DupFd(self._reader)}
        return {"reader": DupFd(self._reader), "writer": DupFd(self._writer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "both" in state:
            self._reader = self._writer = state["both"].detach()
        else:
            self._reader, self._writer = state["reader"].detach(), state["writer"].detach()
        self._prepare()

    def set(self) -> None:
        """Wake who waits, now or when it next waits."""
        # A full pipe or counter is set already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, _ONE)

    def clear(self) -> None:
        """Forget that it was set."""
        with contextlib.suppress(BlockingIOError):  # another sleeper was quicker
            os.read(self._reader, 4096)

    def wait(self, seconds: float) -> None:
        """Sleep until it is set, at most `seconds`, and clear it."""
        poll = select.poll()  # one each: several threads may wait
        poll.register(self._reader, select.POLLIN)
        if poll.poll(seconds * 1000):
            self.clear()

    def fileno(self) -> int:
        """A descriptor that is readable while the event is set."""
        return self._reader


def wait_any(first: FdEvent, others: tuple[Event, ...], seconds: float) -> bool:
    """Sleep until one of them is set, at most `seconds`, and clear what is set; whether the first
    one was.
    """
    poll = select.poll()
    for event in (first, *others):
        poll.register(event.fileno(), select.POLLIN)
    found = {fd for fd, _ in poll.poll(seconds * 1000)}
    for event in (first, *others):
        if event.fileno() in found:
            event.wait(0.0)
    return first.fileno() in found


def wait_until(
    look: Callable[[], T | None],
    hint: Callable[[], bool],
    event: Event,
    *,
    timeout: float | None,
    spin_seconds: float,
) -> T | None:
    """What `look` finds, as soon as it finds something; None after `timeout` seconds.

    hint: whether looking is worth its lock; may be wrong. Whatever `look` may come to find is
    followed by `event.set()`, so a change after a look in vain ends the next wait at once.
    spin_seconds: how long to ask `hint` before sleeping; waking a process takes as long.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        spin_until = time.monotonic() + spin_seconds
        while True:
            if hint() and (found := look()) is not None:
                return found
            now = time.monotonic()
            if now >= spin_until:
                break
        seconds = LOOK_AGAIN_SECONDS if until is None else min(LOOK_AGAIN_SECONDS, until - now)
        if seconds <= 0:
            return look()
        event.wait(seconds)
        if (found := look()) is not None:
            return found
