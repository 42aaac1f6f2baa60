"""Returns and lengths of the episodes that end in a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unirl.core.metrics import Metrics


class EpisodeWindow:
    """The most recent episodes of training: what `charts/episodic_return` is the mean of."""

    def __init__(self, size: int) -> None:
        self.returns: deque[float] = deque(maxlen=size)
        self.lengths: deque[int] = deque(maxlen=size)
        self._size = size

    def read(self, data: Mapping[str, Any], metrics: Metrics) -> tuple[int, int]:
        """Take over the episodes that end in an unroll [T, B], raw returns, in order of time.

        Returns how many rows count (mask) and how many environments had to be reset because their
        state was not finite. On a device this is the one wait of an update: all that the host has
        to know comes in one copy of fixed size.
        """
        ended = (data["terminated"] | data["truncated"]).flatten()
        places = torch.arange(1, ended.numel() + 1, device=ended.device)
        # The newest first; 0 where the batch has fewer ends than there are places.
        newest = torch.where(ended, places, 0).topk(min(self._size, ended.numel())).values
        rows = (newest - 1).clamp(min=0)
        faults = data.get("counter", {}).get("nan_states")
        told = torch.cat(
            (
                data["mask"].sum(dtype=torch.float64).reshape(1),
                ended.sum(dtype=torch.float64).reshape(1),
                ended.new_zeros(1, dtype=torch.float64)
                if faults is None
                else faults.sum(dtype=torch.float64).reshape(1),
                data["episode_return"].flatten()[rows].double(),
                data["episode_length"].flatten()[rows].double(),
            )
        )
        # device -> host, once per batch
        num_rows, num_ended, num_faults, *episodes = told.tolist()
        returns, lengths = episodes[: len(rows)], episodes[len(rows) :]
        num_new = min(int(num_ended), len(rows))
        if num_new:
            self.returns.extend(returns[:num_new][::-1])
            self.lengths.extend(int(length) for length in lengths[:num_new][::-1])
            metrics.total("charts/episodes", int(num_ended))
            metrics.last("charts/episodic_return", sum(self.returns) / len(self.returns))
            metrics.last("charts/episodic_length", sum(self.lengths) / len(self.lengths))
        return int(num_rows), int(num_faults)

    def state_dict(self) -> dict[str, list[float]]:
        """JSON."""
        return {"returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Iterable[float]]) -> None:
        """Put a saved window back."""
        self.returns.extend(state["returns"])
        self.lengths.extend(int(length) for length in state["lengths"])
