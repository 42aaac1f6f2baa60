"""A policy as one function of plain arrays: raw observation in, deterministic action out.

Inputs are named by their place in the observation ("obs" where it is no Dict), then the recurrent
state ("state/h"); rows [B, ...] of any number, in the environment's own dtypes. Outputs are the
action as the environment takes it (clipped, counted from its start), what it was chosen from, and
the next state. Statistics that normalise are part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unirl.action_space import find_mask, parts
from unirl.core.tree import Path, leaves
from unirl.policy import Policy
from unirl.policy.activation import elu_
from unirl.policy.blocks import BLOCK
from unirl.policy.distributions import Categorical, DiagGaussian, Hybrid, MultiCategorical
from unirl.policy.inputs import ImageLeaf, space_leaves
from unirl.policy.networks import MLP, PixelConv
from unirl.policy.own.inputs import OwnInputs
from unirl.policy.pixel_norm import PixelNorm

OBS, ACTION, STATE = "obs", "action", "state"
_NO_TORCH_DTYPE = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}


@dataclass(frozen=True)
class Port:
    """One input or output: [B, *shape]."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    """Inputs: image, numbers, index, mask or state. Outputs: action, logits, mean or state."""
    path: Path = ()
    """Where it is in the observation, the action or the state."""


class ActFunction(nn.Module):
    """The function, for the policy's weights as they are now."""

    def __init__(
        self,
        policy: Policy,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        super().__init__()
        self._policy = _portable(policy)
        self._action_space = action_space
        self._starts = _starts(observation_space)
        self.inputs = [*_observed(self._policy, observation_space), *self._states()]
        self.outputs = self._find_outputs()

    @property
    def num_observed(self) -> int:
        """How many inputs are not state."""
        return sum(port.kind != STATE for port in self.inputs)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Outputs, in the order of `outputs`, of inputs in the order of `inputs`."""
        return tuple(value for _, value in self._named(values))

    def example(self, num_rows: int) -> tuple[Tensor, ...]:
        """Inputs of this many rows: the smallest indices, masks that allow everything, else 0."""
        values = []
        for port in self.inputs:
            value = torch.full((num_rows, *port.shape), int(port.kind == "mask"))
            if port.kind == "index":
                value = value + self._starts.get(port.path, 0)
            values.append(value.to(_dtype(port.dtype)))
        return tuple(values)

    def _named(self, values: Sequence[Tensor]) -> list[tuple[Port, Tensor]]:
        obs: dict[str, Any] = {}
        state: dict[str, Tensor] = {}
        root: Any = obs
        for port, value in zip(self.inputs, values, strict=True):
            if port.kind == STATE:
                state[port.path[0]] = value
                continue
            read = _as_stored(value, self._starts.get(port.path))
            if not port.path:
                root = read
                continue
            here = obs
            for key in port.path[:-1]:
                here = here.setdefault(key, {})
            here[port.path[-1]] = read
        distribution, state = self._policy.decide(root, state)
        action = _for_env(self._action_space, distribution.mode())
        named = [
            (_port(ACTION, path, leaf, ACTION), leaf) for path, leaf in leaves(action)
        ] + _chosen_from(distribution, ())
        named += [(_port(STATE, (name,), leaf, STATE), leaf) for name, leaf in state.items()]
        return named

    def _states(self) -> list[Port]:
        return [
            Port(f"{STATE}/{name}", tuple(leaf.shape[1:]), "float32", STATE, (name,))
            for name, leaf in self._policy.initial_state(1).items()
        ]

    @torch.no_grad()
    def _find_outputs(self) -> list[Port]:
        # An input and an output may not share a name.
        return [
            replace(port, name=f"next_{port.name}") if port.kind == STATE else port
            for port, _ in self._named(self.example(2))
        ]


def _observed(policy: Policy, space: gymnasium.Space[Any]) -> list[Port]:
    """What the actor reads; a critic's own observations are nothing that it needs."""
    inputs, kinds = policy.inputs, dict[Path, str]()
    if isinstance(inputs, OwnInputs):
        kinds |= inputs.kinds
    else:
        kinds |= {leaf.path: "image" for leaf in inputs.images}
        kinds |= {leaf.path: "numbers" for leaf in inputs.floats}
        kinds |= {leaf.path: "index" for leaf in inputs.indices}  # type: ignore[misc]
    mask = find_mask(space)
    if mask is not None:
        kinds[(mask,)] = "mask"
    return [
        Port("/".join(path) or OBS, tuple(leaf.shape or ()), _dtype_name(leaf), kinds[path], path)
        for path, leaf in space_leaves(space)
        if path in kinds
    ]


def _dtype_name(space: gymnasium.Space[Any]) -> str:
    """What the environment gives, where torch knows it."""
    name = np.dtype(space.dtype).name
    return str(_NO_TORCH_DTYPE[name]).removeprefix("torch.") if name in _NO_TORCH_DTYPE else name


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _starts(space: gymnasium.Space[Any]) -> dict[Path, Tensor]:
    """What Discrete and MultiDiscrete entries are counted from, where that is not 0."""
    return {
        path: torch.as_tensor(np.asarray(leaf.start, np.int64))
        for path, leaf in space_leaves(space)
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete) and np.any(leaf.start)
    }


def _as_stored(value: Tensor, start: Tensor | None) -> Tensor:
    """As slots hold it (unirl/envs/spaces.py): narrow floats, numbers counted from 0."""
    if start is not None:
        return value - start
    if value.dtype in (torch.float64, torch.float16, torch.bool):
        return value.float()
    return value


def _for_env(space: gymnasium.Space[Any], action: Any) -> Any:
    """As the environment takes it (unirl/envs/spaces.py)."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {name: _for_env(part, action[name]) for name, part in parts(space)}
    if isinstance(space, spaces.Box):
        low, high = torch.tensor(space.low), torch.tensor(space.high)
        return torch.minimum(torch.maximum(action.to(low.dtype), low), high)
    if isinstance(space, spaces.MultiBinary):
        return action.to(torch.int8)
    start = np.asarray(space.start, np.int64)  # type: ignore[attr-defined]
    return action + torch.tensor(start) if start.any() else action


def _chosen_from(distribution: Any, path: Path) -> list[tuple[Port, Tensor]]:
    """Normalised logits of choices and means of numbers, part by part."""
    if isinstance(distribution, Hybrid):
        return [
            found
            for name, part in distribution.parts.items()
            for found in _chosen_from(part, (*path, name))
        ]
    kind, value = _kind_and_value(distribution)
    return [(_port(kind, path, value, kind), value)]


def _kind_and_value(distribution: Any) -> tuple[str, Tensor]:
    if isinstance(distribution, Categorical):
        return "logits", distribution.all_logp
    if isinstance(distribution, MultiCategorical):
        return "logits", distribution.choices.all_logp
    assert isinstance(distribution, DiagGaussian)
    return "mean", distribution.mode()


def _port(root: str, path: Path, value: Tensor, kind: str) -> Port:
    name, dtype = "/".join((root, *path)), str(value.dtype).removeprefix("torch.")
    return Port(name, tuple(value.shape[1:]), dtype, kind, path)


def _portable(policy: Policy) -> Policy:
    """A copy of operations that every format knows: images as they are, not as blocks of bytes that
    are read as larger numbers, and activations of torch's own.
    """
    policy = copy.deepcopy(policy).eval().float().requires_grad_(False)
    inputs = policy.inputs
    if isinstance(inputs, OwnInputs):  # what the user wrote is written as it is
        return policy
    whitened = [image for image in inputs.images if image.whitened]
    inputs.pixel_norms = nn.ModuleList(
        _Whitening(image, norm)  # type: ignore[arg-type]
        for image, norm in zip(whitened, inputs.pixel_norms, strict=True)
    )
    inputs.images = [replace(image, blocked=False) for image in inputs.images]
    for module in policy.modules():
        if isinstance(module, PixelConv):
            module.blocked = False
    torso: Any = policy.torso
    if torso.mlp is not None:
        torso.mlp = _Layers(torso.mlp)
    return policy


class _Layers(nn.Module):
    """An MLP with torch's own products and activations, whatever is fastest."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.layers, self.activation = mlp.layers, mlp.activation
        if self.activation is elu_:
            self.activation = nn.functional.elu

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class _Whitening(nn.Module):
    """A PixelNorm over images that are not in blocks."""

    scale: Tensor
    shift: Tensor

    def __init__(self, image: ImageLeaf, norm: PixelNorm) -> None:
        super().__init__()
        for name, value in (("scale", norm.scale), ("shift", norm.shift)):
            if image.blocked:  # [H / 4, W / 4, C * 16]: lines, then pixels of a block
                height, width, _ = value.shape
                split = value.reshape(height, width, image.channels, BLOCK, BLOCK)
                value = split.permute(0, 3, 1, 4, 2).reshape(
                    height * BLOCK, width * BLOCK, image.channels
                )
            self.register_buffer(name, value.permute(2, 0, 1).clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift
