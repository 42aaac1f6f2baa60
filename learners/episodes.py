"""Returns and lengths of the episodes that end in a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unirl.metrics.metrics import Metrics


class EpisodeWindow:
    """The most recent episodes of training: what `charts/episodic_return` is the mean of."""

    def __init__(self, size: int) -> None:
        self.returns: deque[float] = deque(maxlen=size)
        self.lengths: deque[int] = deque(maxlen=size)
        self._size = size

    def read(self, data: Mapping[str, Any], metrics: Metrics) -> tuple[int, int]:
        """Add the episodes that end in an unroll [T, B], raw returns, in order of time.

        Returns how many rows count (mask) and how many environments had to be reset because their
        state was not finite. On a device this is the one wait of an update: all that the host has
        to know comes in one copy of fixed size.
        """
        ended = (data["terminated"] | data["truncated"]).flatten()
        indices = torch.arange(1, ended.numel() + 1, device=ended.device)
        # The newest first; 0 where the batch has fewer ends than the window.
        newest = torch.where(ended, indices, 0).topk(min(self._size, ended.numel())).values
        rows = (newest - 1).clamp(min=0)
        faults = data.get("counter", {}).get("nan_states", ended.new_zeros(1))
        counts = [one.sum(dtype=torch.float64) for one in (data["mask"], ended, faults)]
        episodes = [data[f"episode_{name}"].flatten()[rows] for name in ("return", "length")]
        # device -> host, once per batch
        found = torch.cat((torch.stack(counts), *(one.double() for one in episodes))).tolist()
        num_rows, num_ended, num_faults = found[:3]
        returns, lengths = found[3 : 3 + len(rows)], found[3 + len(rows) :]
        num_new = min(int(num_ended), len(rows))
        if num_new:
            self.returns.extend(returns[:num_new][::-1])
            self.lengths.extend(int(length) for length in lengths[:num_new][::-1])
            metrics.total("charts/episodes", int(num_ended))
            metrics.last("charts/episodic_return", sum(self.returns) / len(self.returns))
            metrics.last("charts/episodic_length", sum(self.lengths) / len(self.lengths))
        return int(num_rows), int(num_faults)

    def clear(self) -> None:
        """Forget all of them."""
        self.returns.clear()
        self.lengths.clear()

    def state_dict(self) -> dict[str, list[float]]:
        return {"returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Iterable[float]]) -> None:
        self.returns.extend(state["returns"])
        self.lengths.extend(int(length) for length in state["lengths"])
