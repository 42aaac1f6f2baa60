"""What an algorithm wants of a batch: the part of a learner that IMPALA and PPO do not share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from unirl.core.metrics import Metrics
from unirl.core.tree import tree_map
from unirl.vtrace import Loss

Rows: TypeAlias = Mapping[str, Any]
"""A batch or some of its environments: obs [T+1, B, ...], reset [T+1, B] (rows whose recurrent
state begins anew), state [B, ...] before row 0, everything else [T, B, ...]. From `UnrollLearner`:
action, logp, mask, reward (scaled and clipped), discount (gamma, 0 where terminated)."""


class Losses(NamedTuple):
    """What an objective finds in rows; the first three are minimised, weighted by the config."""

    policy: Loss
    value: Loss
    entropy: Loss
    divergence: Loss
    """Estimated KL from the policy that the batch is held against; without gradient."""


class Objective(Protocol):
    """What an algorithm wants of a batch."""

    @property
    def parts_steps(self) -> bool:
        """Whether `prepare` puts the steps of all environments side by side, [1, T * B], so that
        minibatches hold steps from anywhere. Else they hold whole unrolls.
        """

    def prepare(self, rows: Rows, metrics: Metrics) -> Rows:
        """Once per batch, before the first step on it: the rows that `losses` gets, divided."""

    def losses(self, rows: Rows, metrics: Metrics) -> Losses:
        """Once per minibatch of what `prepare` returned."""

    def settings(self) -> Mapping[str, Any]:
        """Settings that decide what `state_dict` consists of, by their keys."""

    def state_dict(self) -> dict[str, Any]:
        """A tree of tensors; empty when nothing is kept from batch to batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""


def select(rows: Rows, envs: Tensor) -> Rows:
    """These environments of the rows, as fresh memory."""
    return {
        name: tree_map(lambda leaf, axis=int(name != "state"): leaf.index_select(axis, envs), tree)
        for name, tree in rows.items()
    }
