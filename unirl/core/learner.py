"""Who consumes batches. A learner owns the optimiser and the version of the weights, and never
knows who acted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from unirl.core.sample import Batch
from unirl.core.tree import Tree
from unirl.core.weights import Weights
from unirl.metrics.metrics import Metrics


@dataclass
class LearnerState:
    """All that a learner needs to continue exactly where it was: two trees of tensors, and JSON for
    the rest.
    """

    model: Tree
    optimizer: Tree
    counters: Mapping[str, Any] = field(default_factory=dict)


class Learner(Protocol):
    """Turns batches into newer weights."""

    version: int
    """Updates made so far: the version of `weights()`."""
    num_steps: int
    """Samples learned so far in the recipe's unit: environment steps without filler rows, or
    completions.
    """

    def step(self, batch: Batch) -> Metrics:
        """Learn from one batch and raise `version` by one; the batch may be read until this
        returns.
        """

    def weights(self) -> Weights:
        """What actors need; the runner copies it before the next step."""

    def state_dict(self) -> LearnerState:
        """What `load_state_dict` needs to continue exactly."""

    def load_state_dict(self, state: LearnerState) -> None:
        """Continue from a saved state; UniRLError when it is of another model."""


@runtime_checkable
class EpisodicLearner(Protocol):
    """A learner that knows how its recent episodes went: what `run.target_return` needs."""

    @property
    def recent_returns(self) -> Sequence[float]:
        """Returns of the most recent episodes, at most `run.target_window`."""


@runtime_checkable
class TimedLearner(Protocol):
    """A learner whose schedules may follow the clock: what `run.anneal_over` seconds needs."""

    def record_training_seconds(self, seconds: float) -> None:
        """The training time so far, earlier sessions included; called before each step."""


@runtime_checkable
class TunableLearner(EpisodicLearner, Protocol):
    """A learner whose settings may change while it trains: what populations need."""

    def setting(self, key: str) -> float:
        """The value of such a setting."""

    def tune(self, settings: Mapping[str, float]) -> None:
        """Other values from the next update on."""

    def adopt(self, other: LearnerState) -> None:
        """Continue as another learner would, but with settings and episodes of its own."""


@dataclass(frozen=True)
class LearnerContext:
    """What a runner passes to a learner when it makes one."""

    seed: int
