"""What guards a queue's table: a lock, and a bell for each who may wait; source: none."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Protocol


class Guard(Protocol):
    """Mutual exclusion over the table (`with guard:`), and a bell for each who may wait."""

    watches: bool
    """Whether to watch the table before sleeping. Not among threads: a watcher holds up the one it
    waits for."""
    own: AbstractContextManager[object]
    """To be entered instead of the guard where no other process writes the same words: it shuts out
    this process's threads alone. Others see the stores inside in their order, after all earlier
    ones, and before whatever follows is loaded."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def ring(self, bell: int) -> None:
        """Wake whoever waits at this bell, now or next."""

    def wait(self, bell: int, seconds: float) -> None:
        """Sleep until the bell rings, at most `seconds`; without the lock; may return early."""


class LocalGuard(AbstractContextManager[object]):
    """The guard for threads of one process."""

    watches = False

    def __init__(self, num_bells: int) -> None:
        self._lock = threading.Lock()
        self.own: AbstractContextManager[object] = self._lock
        self._bells = [threading.Event() for _ in range(num_bells)]

    def __enter__(self) -> object:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def ring(self, bell: int) -> None:
        self._bells[bell].set()

    def wait(self, bell: int, seconds: float) -> None:
        self._bells[bell].wait(seconds)
        self._bells[bell].clear()
