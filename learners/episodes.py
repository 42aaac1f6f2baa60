"""Returns and lengths of the episodes that end in a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from unirl.core.metrics import Metrics


class EpisodeWindow:
    """The most recent episodes of training: what `charts/episodic_return` is the mean of."""

    def __init__(self, size: int) -> None:
        self.returns: deque[float] = deque(maxlen=size)
        self.lengths: deque[int] = deque(maxlen=size)

    def read(self, data: Mapping[str, Any], metrics: Metrics) -> None:
        """Take over the episodes that end in an unroll [T, B], raw returns, in order of time."""
        ended = data["terminated"] | data["truncated"]
        if not ended.any():
            return
        self.returns.extend(data["episode_return"][ended].tolist())
        self.lengths.extend(data["episode_length"][ended].tolist())
        metrics.total("charts/episodes", int(ended.sum()))
        metrics.last("charts/episodic_return", sum(self.returns) / len(self.returns))
        metrics.last("charts/episodic_length", sum(self.lengths) / len(self.lengths))

    def state_dict(self) -> dict[str, list[float]]:
        """JSON."""
        return {"returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Iterable[float]]) -> None:
        """Put a saved window back."""
        self.returns.extend(state["returns"])
        self.lengths.extend(int(length) for length in state["lengths"])
