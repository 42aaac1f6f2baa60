"""From features to a distribution over one action space, with the options of a mask alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

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

Layers: TypeAlias = Callable[[int], nn.Module]
"""Makes a layer from features [..., F] to so many numbers."""


def linear_layers(num_in: int, generator: torch.Generator) -> Layers:
    return partial(_linear, num_in, generator=generator)


def _linear(num_in: int, num_out: int, generator: torch.Generator) -> nn.Module:
    return linear(num_in, num_out, POLICY_GAIN, generator)


class Columns:
    """Layers of a network with heads of its own: the next so many of its outputs, in the order of
    the action's parts. A choice of n options (Discrete, each of MultiDiscrete) has n logits, each
    of a MultiBinary 2; a Box of d numbers has d means and then the d logarithms of their standard
    deviations.
    """

    def __init__(self) -> None:
        self._end = 0

    def __call__(self, num_out: int) -> nn.Module:
        begin, self._end = self._end, self._end + num_out
        return _Columns(begin, self._end)


class _Columns(nn.Module):
    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self._columns = slice(begin, end)

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs[..., self._columns]


def num_parameters(space: gymnasium.Space[Any]) -> int:
    """Of the distribution over an action space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(num_parameters(part) for _, part in parts(space))
    if isinstance(space, spaces.Box):
        return 2 * int(np.prod(space.shape))
    return sum(num_options(space))


def make_action_head(
    space: gymnasium.Space[Any], layers: Layers, initial_std: float | None
) -> nn.Module:
    """A module (features, mask or None) -> Distribution; UniRLError for an action space that none
    fits. mask: [..., number of options], 0 where an option is not allowed (unirl/action_space.py).
    initial_std: of Gaussian actions, the same in all states; None: a layer says what it is.
    """
    if isinstance(space, spaces.Discrete):
        return DiscreteHead(space, layers)
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        return MultiDiscreteHead(space, layers)
    if isinstance(space, spaces.Box) and np.issubdtype(np.dtype(space.dtype), np.floating):
        return GaussianHead(space, layers, initial_std)
    if isinstance(space, spaces.MultiBinary):
        return MultiDiscreteHead(space, layers)
    if isinstance(space, spaces.Dict | spaces.Tuple) and parts(space):
        return HybridHead(space, layers, initial_std)
    raise UniRLError(
        f"action space {space} is not supported",
        "known: Discrete, MultiDiscrete of one axis, MultiBinary, Box of floats, and Dict or Tuple"
        " of these",
        "convert it with a gymnasium action wrapper",
    )


class DiscreteHead(nn.Module):
    """Logits over n actions."""

    def __init__(self, space: spaces.Discrete, layers: Layers) -> None:
        super().__init__()
        self.linear = layers(int(space.n))

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
        layers: Layers,
    ) -> None:
        super().__init__()
        sizes = num_options(space)
        self.num_choices, self.shape = len(sizes), tuple(space.shape)
        self.linear = layers(sum(sizes))
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
    """Mean from features; log_std [D] is the same for all states, unless a layer says what it is.
    No bounds are applied.
    """

    def __init__(self, space: spaces.Box, layers: Layers, initial_std: float | None) -> None:
        super().__init__()
        self.shape = tuple(space.shape)
        size = int(np.prod(self.shape))
        self.linear = layers(size)
        self.log_std: nn.Parameter | nn.Module
        if initial_std is None:
            self.log_std = layers(size)
        else:
            self.log_std = nn.Parameter(torch.full((size,), math.log(initial_std)))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        own = self.log_std
        log_std: Tensor = own(features) if isinstance(own, nn.Module) else own
        return DiagGaussian(self.linear(features), log_std, self.shape)


class HybridHead(nn.Module):
    """A head for each part of a Dict or Tuple; parts may be Dicts and Tuples themselves."""

    def __init__(
        self,
        space: spaces.Dict | spaces.Tuple[Any],
        layers: Layers,
        initial_std: float | None,
    ) -> None:
        super().__init__()
        self.names = [name for name, _ in parts(space)]
        self.heads = nn.ModuleList(
            make_action_head(part, layers, initial_std) for _, part in parts(space)
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
