"""How often a process or an actor may be started again."""

from __future__ import annotations

import time
from collections import deque

from unirl.errors import ActorFailed


class Restarts:
    """Counts the restarts of one actor within a window of time: a run of days may meet more faults
    than one that breaks at once.
    """

    def __init__(self, limit: int, window_seconds: float) -> None:
        self._limit, self._window = limit, window_seconds
        self._recent: deque[float] = deque()
        self.total = 0

    def count(self, what: str, remedy: str, cause: BaseException | None = None) -> None:
        """One more restart; ActorFailed where there were too many of late."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] > self._window:
            self._recent.popleft()
        if len(self._recent) >= self._limit:
            raise ActorFailed(
                what,
                f"it was restarted {self._limit} of {self._limit} times (runner.max_restarts) "
                f"within {self._window:g} s",
                remedy,
            ) from cause
        self._recent.append(now)
        self.total += 1
