"""The training return is that of the most recent episodes, wherever in their batches they end."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.learners.episodes import EpisodeWindow
from unirl.metrics.metrics import Metrics


def unroll(first: float) -> dict[str, Tensor]:
    """5 steps of 4 environments; returns count on from `first`, step by step. One episode
    terminates after its second step, one is cut off after its fourth.
    """
    returns = (torch.arange(5.0) + first).unsqueeze(1).expand(5, 4)
    terminated, truncated = torch.zeros(2, 5, 4, dtype=torch.bool)
    terminated[1, 3] = truncated[3, 0] = True
    return {
        "terminated": terminated,
        "truncated": truncated,
        "mask": torch.ones(5, 4, dtype=torch.bool),
        "episode_return": returns,
        "episode_length": returns * 10,
    }


def test_a_window_holds_the_newest_episodes_in_order_of_time() -> None:
    window, metrics = EpisodeWindow(3), Metrics()
    for first in (0.0, 5.0):
        assert window.read(unroll(first), metrics) == (20, 0)
    assert list(window.returns) == [3.0, 6.0, 8.0]
    assert list(window.lengths) == [30, 60, 80]
    found = metrics.flush()
    assert found["charts/episodes"] == 4
    assert found["charts/episodic_return"] == (3.0 + 6.0 + 8.0) / 3
    assert found["charts/episodic_length"] == (30 + 60 + 80) / 3


def test_of_more_ends_than_the_window_holds_only_the_newest_stay() -> None:
    window = EpisodeWindow(1)
    window.read(unroll(0.0), Metrics())
    assert list(window.returns) == [3.0]
