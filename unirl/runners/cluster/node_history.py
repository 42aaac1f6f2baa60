"""What a run knows of its nodes: when agents of theirs were lost, and how soon agents connect."""

from __future__ import annotations

import time
from collections import defaultdict

_RECENT_SECONDS = 60.0
"""Ray counts a node that is gone as alive for so long, unless a setting says otherwise."""
_LEAST_PATIENCE_SECONDS, _TIMES_SLOWEST = 5.0, 3.0


class NodeHistory:
    """limit: failures within window_seconds after which a node is left out. wait_seconds: which an
    agent has to connect.
    """

    def __init__(self, limit: int, window_seconds: float, wait_seconds: float) -> None:
        self._limit, self._window, self._wait_seconds = limit, window_seconds, wait_seconds
        self._failures: defaultdict[str, list[float]] = defaultdict(list)
        self._lost_at: dict[str, float] = {}
        self._slowest = 0.0

    def lose(self, node: str, *, is_failure: bool = True) -> bool:
        """An agent there was lost; whether the node is left out from now on. is_failure: not one
        that another node just took over from.
        """
        now = self._lost_at[node] = time.monotonic()
        if not is_failure:
            return False
        self._failures[node].append(now)
        return self._num_failures(node) == self._limit

    def _num_failures(self, node: str) -> int:
        now = time.monotonic()
        self._failures[node] = [at for at in self._failures[node] if now - at < self._window]
        return len(self._failures[node])

    def is_left_out(self, node: str) -> bool:
        """Whether it has failed too often."""
        return self._num_failures(node) >= self._limit

    def lost_at(self, node: str) -> float:
        """When an agent there was lost last; 0.0: never."""
        return self._lost_at.get(node, 0.0)

    def has_failed(self, node: str) -> bool:
        """Whether that was of late: the node may be gone, and its cluster not know of it yet."""
        at = self.lost_at(node)
        return at > 0.0 and time.monotonic() - at < _RECENT_SECONDS

    def connect(self, seconds: float) -> None:
        """So long an agent took from its start until it was connected."""
        self._slowest = max(self._slowest, seconds)

    def patience(self, node: str) -> float:
        """How long to wait for an agent that is started there before another node is to take its
        place, if one can: less than `ray.wait_seconds` only where an agent was lost of late, and
        others of this run have shown how long it takes.
        """
        if not self._slowest or not self.has_failed(node):
            return self._wait_seconds
        return min(self._wait_seconds, max(_LEAST_PATIENCE_SECONDS, _TIMES_SLOWEST * self._slowest))
