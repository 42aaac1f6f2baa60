"""What an algorithm makes of a batch: what the learners of IMPALA and PPO do not share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from unirl.core.tree import tree_map
from unirl.metrics.metrics import Metrics
from unirl.vtrace import Loss

UnrollRows: TypeAlias = Mapping[str, Any]
"""A batch or some of its environments: obs [T+1, B, ...], reset [T+1, B] (rows whose recurrent
state is reset), state [B, ...] before row 0, everything else [T, B, ...]. From `UnrollLearner`:
action, logp, mask, reward (scaled and clipped), discount (gamma, 0 where terminated); value [T+1,
B] of the policy that acted, where that is always the learner's."""


class Losses(NamedTuple):
    """What an objective finds in rows; the first three are minimised, weighted by the config."""

    policy: Loss
    value: Loss
    entropy: Loss
    divergence: Loss
    """Estimated KL from the policy that the batch is held against; without gradient."""


class UnrollObjective(Protocol):
    """What an algorithm makes of a batch. reduce, an argument of those that are made: sums over the
    processes that share the batch, or None.
    """

    config: Any
    """Its settings, which may be replaced between two updates."""

    @property
    def splits_steps(self) -> bool:
        """Whether `prepare` puts the steps of all environments side by side, [1, T * B], so that
        minibatches hold steps from anywhere. Else they hold whole unrolls.
        """

    @property
    def is_additive(self) -> bool:
        """Whether `losses` of some rows are a share of those of all: it changes and asks nothing
        else, so that several threads may call it at once.
        """

    def prepare(self, rows: UnrollRows, metrics: Metrics) -> UnrollRows:
        """Once per batch, before the first step on it: the rows that minibatches are made of."""

    def losses(self, rows: UnrollRows, metrics: Metrics) -> Losses:
        """Once per minibatch of what `prepare` returned."""

    def settings(self) -> Mapping[str, Any]:
        """Settings that decide what `state_dict` consists of, by their keys."""

    def state_dict(self) -> dict[str, Any]:
        """A tree of tensors; empty when nothing is kept from batch to batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""


def select(rows: UnrollRows, envs: Tensor) -> UnrollRows:
    """These environments of the rows, as fresh memory."""
    return {
        name: tree_map(lambda leaf, axis=int(name != "state"): leaf.index_select(axis, envs), tree)
        for name, tree in rows.items()
    }
