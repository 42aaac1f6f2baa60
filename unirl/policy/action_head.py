"""From features to a distribution over one action space."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unirl.errors import UniRLError
from unirl.policy.distributions import (
    PADDED_LOGIT,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
)
from unirl.policy.initialize import linear

POLICY_GAIN = 0.01
"""Small, so that the first policy is nearly uniform whatever is observed."""


def make_action_head(
    space: gymnasium.Space[Any], num_in: int, initial_std: float, generator: torch.Generator
) -> nn.Module:
    """The head for Discrete, MultiDiscrete or float Box; UniRLError for any other action space."""
    if isinstance(space, spaces.Discrete):
        return DiscreteHead(space, num_in, generator)
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        return MultiDiscreteHead(space, num_in, generator)
    if isinstance(space, spaces.Box) and np.issubdtype(np.dtype(space.dtype), np.floating):
        return GaussianHead(space, num_in, initial_std, generator)
    raise UniRLError(
        f"action space {space} is not supported",
        "known: Discrete, MultiDiscrete of one axis, and Box of floats",
        "convert it with a gymnasium action wrapper",
    )


class DiscreteHead(nn.Module):
    """Logits over n actions."""

    def __init__(self, space: spaces.Discrete, num_in: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear(num_in, int(space.n), POLICY_GAIN, generator)

    def forward(self, features: Tensor) -> Distribution:
        return Categorical(self.linear(features))


class MultiDiscreteHead(nn.Module):
    """Logits of all choices side by side, padded to [..., n, A] where choices differ in size."""

    column: Tensor | None

    def __init__(
        self, space: spaces.MultiDiscrete, num_in: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        sizes = [int(size) for size in space.nvec.reshape(-1)]
        self.num_choices = len(sizes)
        self.linear = linear(num_in, sum(sizes), POLICY_GAIN, generator)
        column = None
        if len(set(sizes)) > 1:
            # Column of each padded entry among the logits; the one after the last is the padding.
            column = torch.full((len(sizes), max(sizes)), sum(sizes))
            for choice, size in enumerate(sizes):
                begin = sum(sizes[:choice])
                column[choice, :size] = torch.arange(begin, begin + size)
            column = column.reshape(-1)
        self.register_buffer("column", column, persistent=False)

    def forward(self, features: Tensor) -> Distribution:
        logits = self.linear(features)
        if self.column is not None:
            logits = nn.functional.pad(logits, (0, 1), value=PADDED_LOGIT)[..., self.column]
        return MultiCategorical(logits.unflatten(-1, (self.num_choices, -1)))


class GaussianHead(nn.Module):
    """Mean from features; log_std [D] is the same for all states. No bounds are applied."""

    def __init__(
        self, space: spaces.Box, num_in: int, initial_std: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shape = tuple(space.shape)
        size = int(np.prod(self.shape))
        self.linear = linear(num_in, size, POLICY_GAIN, generator)
        self.log_std = nn.Parameter(torch.full((size,), math.log(initial_std)))

    def forward(self, features: Tensor) -> Distribution:
        return DiagGaussian(self.linear(features), self.log_std, self.shape)
