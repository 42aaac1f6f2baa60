"""Waiting for a change of the queue's table, and waking those who wait for it; source: none.

Whoever waits sets a mark and looks once more; whoever changes something looks for marks after it.
For one of the two to see the other, each one's store must be seen before it loads: in between, the
one enters a lock and the other leaves one. On x86 that is a fence, whichever lock it is; elsewhere
it is the same lock (see `Guard.own`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from unirl.core.guard import Guard

# A lost wake-up must never become a hang: every sleeper looks again after this long, whatever
# happened to its bell.
LOOK_AGAIN_SECONDS = 0.1
# Waking a process takes 50 to 200 microseconds, several times as long as copying a slot: whoever
# waits looks again and again for about as long before it sleeps.
_WATCH_SECONDS = 100e-6
T = TypeVar("T")


class Waiters:
    """One mark and one bell for each who may wait.

    marks: a word for each, zeroed by the creator, in the memory of the table.
    """

    def __init__(self, marks: memoryview, guard: Guard) -> None:
        self._marks, self._guard = marks, guard

    def mark(self, bell: int, waits: bool = True) -> None:
        """Say that this one waits, or does not. Who says that it waits must look once more."""
        self._marks[bell] = waits

    def ring(self, bells: Iterable[int]) -> None:
        """Wake those of them that wait. After the change, and after its lock was left."""
        for bell in bells:
            if self._marks[bell]:
                self._guard.ring(bell)

    def wait_for(
        self, bell: int, look: Callable[[bool], T | None], timeout: float | None
    ) -> T | None:
        """What `look` finds, as soon as it finds something; None after `timeout` seconds.

        look(False) may overlook a change of this moment; look(True), which enters the guard, not.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (found := self._watch(look, until)) is None:
            self.mark(bell)
            try:
                if (found := look(True)) is not None:
                    break
                seconds = LOOK_AGAIN_SECONDS
                if until is not None:
                    seconds = min(seconds, until - time.monotonic())
                if seconds <= 0:
                    break
                self._guard.wait(bell, seconds)
            finally:
                self.mark(bell, False)
        return found

    def _watch(self, look: Callable[[bool], T | None], until: float | None) -> T | None:
        """Look without a mark, for as long as it pays."""
        found = look(False)
        if found is None and self._guard.watches:
            end = time.monotonic() + _WATCH_SECONDS
            end = end if until is None else min(end, until)
            while (found := look(False)) is None and time.monotonic() < end:
                pass
        return found
