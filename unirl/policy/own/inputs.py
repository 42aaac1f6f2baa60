"""What a network of the user's own reads of observations: the tree itself, with its numbers as
torch computes with them.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unirl.core.tree import Path, leaf_at, unflatten
from unirl.errors import UniRLError
from unirl.policy.config import PolicyConfig
from unirl.policy.inputs import space_leaves
from unirl.policy.normalize import RunningNorm

_LARGE = 10.0
"""Bound on the numbers of an example."""


class OwnInputs(nn.Module):
    """Floats as float32, whitened where policy.normalize_obs is set; uint8 as it is, unscaled;
    everything else as int64. A Tuple is a dictionary with the keys "0", "1", ...
    """

    images = ()
    """None whose minibatches are divided: what the network does is unknown."""

    def __init__(self, space: gymnasium.Space[Any], config: PolicyConfig) -> None:
        super().__init__()
        self._whitened: list[tuple[Path, tuple[int, ...]]] = [
            (path, leaf.shape)
            for path, leaf in space_leaves(space)
            if isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating)
        ]
        self.kinds: dict[Path, str] = {path: _kind(leaf) for path, leaf in space_leaves(space)}
        """Of each leaf: image, numbers or index."""
        self.norm: RunningNorm | None = None
        if config.normalize_obs:
            size = sum(int(np.prod(shape)) for _, shape in self._whitened)
            if not size:
                raise UniRLError(
                    f"policy.normalize_obs has nothing to normalise in {space}",
                    "it applies to float Boxes",
                    "set policy.normalize_obs to false",
                )
            self.norm = RunningNorm((size,), clip=config.obs_clip)

    @property
    def has_statistics(self) -> bool:
        return self.norm is not None

    def forward(self, obs: Any) -> Any:
        """The observations [N, ...] of the space that it was made with."""
        found = {path: _read(leaf_at(obs, path)) for path in self.kinds}
        if self.norm is not None:
            sizes = [int(np.prod(shape)) for _, shape in self._whitened]
            columns = torch.split(self.norm.normalize(self._floats(obs)), sizes, 1)
            for (path, shape), column in zip(self._whitened, columns, strict=True):
                found[path] = column.reshape(-1, *shape)
        if list(found) == [()]:
            return found[()]
        return unflatten({"/".join(path): leaf for path, leaf in found.items()})

    def update(self, obs: Any, mask: Tensor | None) -> None:
        """Merge rows [N, ...] where mask [N] is true into the statistics."""
        if self.norm is not None:
            self.norm.update(self._floats(obs), mask)

    def _floats(self, obs: Any) -> Tensor:
        return torch.cat([leaf_at(obs, path).float().flatten(1) for path, _ in self._whitened], 1)


def _kind(space: gymnasium.Space[Any]) -> str:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return "index"
    is_image = space.dtype == np.uint8 and len(space.shape or ()) > 1
    return "image" if is_image and isinstance(space, spaces.Box) else "numbers"


def example_rows(space: gymnasium.Space[Any], num_rows: int) -> Any:
    """Observations [num_rows, ...] as they come out of a slot, the same each time."""
    space = copy.deepcopy(space)
    space.seed(0)

    def read(leaf: gymnasium.Space[Any]) -> Tensor:
        drawn = np.stack([np.asarray(leaf.sample()) for _ in range(num_rows)])
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
            drawn = drawn.astype(np.int64) - np.asarray(leaf.start)
        if drawn.dtype.kind == "f":  # bounds may be as large as a float can be
            drawn = drawn.clip(-_LARGE, _LARGE).astype(np.float32)
        return torch.as_tensor(drawn)

    found = {"/".join(path): read(leaf) for path, leaf in space_leaves(space)}
    return found[""] if list(found) == [""] else unflatten(found)


def _read(leaf: Tensor) -> Tensor:
    if leaf.dtype == torch.uint8:
        return leaf
    return leaf.float() if leaf.is_floating_point() else leaf.long()
