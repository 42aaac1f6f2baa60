"""An evaluator plays whole episodes with given weights, and never learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unirl.core.weights import Weights


@dataclass
class EvalResult:
    """Undiscounted returns and lengths of whole episodes."""

    returns: list[float]
    lengths: list[int]

    @property
    def mean(self) -> float:
        """Mean return."""
        return sum(self.returns) / len(self.returns)

    @property
    def std(self) -> float:
        """Standard deviation of the return (population)."""
        mean = self.mean
        return float(
            (sum((value - mean) ** 2 for value in self.returns) / len(self.returns)) ** 0.5
        )


class Evaluator(Protocol):
    """Plays whole episodes with given weights."""

    def evaluate(
        self, weights: Weights, num_episodes: int, *, deterministic: bool = False
    ) -> EvalResult:
        """Returns and lengths of `num_episodes` episodes."""

    def close(self) -> None:
        """Let go of the environments; idempotent."""


@runtime_checkable
class WatchableEvaluator(Protocol):
    """An evaluator whose episodes can be watched."""

    @property
    def frames_per_second(self) -> float:
        """At which speed the frames show the episode as it was."""

    def frames(
        self, weights: Weights, *, deterministic: bool = False, num_episodes: int = 1
    ) -> Iterator[NDArray[np.uint8]]:
        """Pictures [height, width, 3], one per step."""

    def close(self) -> None:
        """Let go of the environments; idempotent."""
