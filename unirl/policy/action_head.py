"""From features to a distribution over one action space, with the options of a mask alone."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unirl.action_space import num_options, parts
from unirl.errors import UniRLError
from unirl.policy.distributions import (
    PADDED_LOGIT,
    Categorical,
    DiagGaussian,
    Distribution,
    Hybrid,
    MultiCategorical,
)
from unirl.policy.initialize import linear

POLICY_GAIN = 0.01
"""Small, so that the first policy is nearly uniform whatever is observed."""


def make_action_head(
    space: gymnasium.Space[Any], num_in: int, initial_std: float, generator: torch.Generator
) -> nn.Module:
    """A module (features, mask or None) -> Distribution; UniRLError for an action space that none
    fits. mask: [..., number of options], 0 where an option is not allowed (unirl/action_space.py).
    """
    if isinstance(space, spaces.Discrete):
        return DiscreteHead(space, num_in, generator)
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        return MultiDiscreteHead(space, num_in, generator)
    if isinstance(space, spaces.Box) and np.issubdtype(np.dtype(space.dtype), np.floating):
        return GaussianHead(space, num_in, initial_std, generator)
    if isinstance(space, spaces.MultiBinary):
        return MultiDiscreteHead(space, num_in, generator)
    if isinstance(space, spaces.Dict | spaces.Tuple) and parts(space):
        return HybridHead(space, num_in, initial_std, generator)
    raise UniRLError(
        f"action space {space} is not supported",
        "known: Discrete, MultiDiscrete of one axis, MultiBinary, Box of floats, and Dict or Tuple"
        " of these",
        "convert it with a gymnasium action wrapper",
    )


class DiscreteHead(nn.Module):
    """Logits over n actions."""

    def __init__(self, space: spaces.Discrete, num_in: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear(num_in, int(space.n), POLICY_GAIN, generator)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        return Categorical(_allowed(self.linear(features), mask))


class MultiDiscreteHead(nn.Module):
    """Logits of all choices side by side, padded to [..., n, A] where choices differ in size. Those
    of MultiBinary have two options each.
    """

    column: Tensor | None

    def __init__(
        self,
        space: spaces.MultiDiscrete | spaces.MultiBinary,
        num_in: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        sizes = num_options(space)
        self.num_choices, self.shape = len(sizes), tuple(space.shape)
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

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        logits = _allowed(self.linear(features), mask)
        if self.column is not None:
            logits = nn.functional.pad(logits, (0, 1), value=PADDED_LOGIT)[..., self.column]
        logits = logits.reshape(*logits.shape[:-1], self.num_choices, -1)
        return MultiCategorical(logits, self.shape)


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

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        return DiagGaussian(self.linear(features), self.log_std, self.shape)


class HybridHead(nn.Module):
    """A head for each part of a Dict or Tuple; parts may be Dicts and Tuples themselves."""

    def __init__(
        self,
        space: spaces.Dict | spaces.Tuple[Any],
        num_in: int,
        initial_std: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.names = [name for name, _ in parts(space)]
        self.heads = nn.ModuleList(
            make_action_head(part, num_in, initial_std, generator) for _, part in parts(space)
        )
        self.num_options = [sum(num_options(part)) for _, part in parts(space)]

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        masks: Any = [None] * len(self.names)
        if mask is not None:
            masks = torch.split(mask, self.num_options, -1)
        named = zip(self.names, self.heads, masks, strict=True)
        return Hybrid({name: head(features, own) for name, head, own in named})


def _allowed(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.float().masked_fill(mask == 0, PADDED_LOGIT)
