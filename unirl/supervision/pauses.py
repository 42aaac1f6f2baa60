"""When this process did not run: stopped together with all others of a run (Ctrl-Z), or on a
machine that slept. Nobody hung then, and no deadline was missed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SHORTEST_SECONDS = 1.0
"""Of a pause: what is shorter may be a busy machine, and matters to no deadline."""
_MOST = 100


class Pauses:
    """Call `look` several times a second; a time without a call is a pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked_at = clock, clock()
        self._ended = deque[tuple[float, float]](maxlen=_MOST)

    def look(self) -> float:
        """The seconds of the pause that has just ended, or 0."""
        now = self._clock()
        seconds, self._looked_at = now - self._looked_at, now
        if seconds < SHORTEST_SECONDS:
            return 0.0
        self._ended.append((now, seconds))
        return seconds

    def within(self, seconds: float) -> float:
        """What a deadline of so many seconds is prolonged by: the pauses that ended within them."""
        since = self._clock() - seconds
        return sum(length for ended, length in self._ended if ended >= since)
