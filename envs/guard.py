"""Keeps broken observations out of slots: shapes are checked at every step, finiteness once per
unroll."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces

from unirl.core.tree import Tree, leaves
from unirl.envs.spaces import wrong_shape
from unirl.errors import UniRLError


class ShapeGuard(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks one environment's observations before a vector engine stacks them, and fails with a
    readable error."""

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env)
        self._env_id = env_id
        self._shapes = list(_shapes(env.observation_space, ()))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; UniRLError when its observation does not fit its space."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._check(obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; UniRLError when its observation does not fit its space."""
        result = self.env.step(action)
        self._check(result[0])
        return result

    def _check(self, obs: Any) -> None:
        for path, shape in self._shapes:
            leaf = obs
            try:
                for key in path:
                    leaf = leaf[key]
            except (KeyError, IndexError, TypeError) as error:
                raise UniRLError(
                    f'env "{self._env_id}" returned an observation without {_name(path)}',
                    f"the observation space is {self.observation_space},"
                    f" received {type(obs).__name__}",
                    "correct the environment's observation_space or its observations",
                ) from error
            received = np.shape(leaf)
            if received != shape:
                raise wrong_shape(
                    self._env_id, shape, received, f" ({_name(path)})" if path else ""
                )


def check_finite(obs: Tree, reward: torch.Tensor, env_id: str) -> None:
    """Raise UniRLError when an observation [T+1, B, ...] or a reward [T, B] is NaN or infinite.

    The error names the field, the environment's index in the batch, the row and the value. Call it
    once per unroll: on good data it costs one sum per floating-point leaf and allocates nothing.
    """
    for path, leaf in (*leaves(obs, ("obs",)), (("reward",), reward)):
        # One pass without a copy. A finite sum has finite terms; the exact test below clears a sum
        # that merely overflowed.
        if not leaf.is_floating_point() or bool(torch.isfinite(leaf.sum())):
            continue
        bad = (~torch.isfinite(leaf)).nonzero()
        if len(bad) == 0:
            continue
        where = bad[0].tolist()
        raise UniRLError(
            f'env "{env_id}" returned {leaf[tuple(where)].item()} in {"/".join(path)}'
            f" of environment {where[1]}",
            "observations and rewards must be finite;"
            f" found {len(bad)} values that are not, the first in row {where[0]}",
            "correct the environment, or clip and replace such values in a wrapper",
        )


def _shapes(
    space: Space[Any], path: tuple[Any, ...]
) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    if isinstance(space, spaces.Dict):
        return [
            item for key, child in space.spaces.items() for item in _shapes(child, (*path, key))
        ]
    if isinstance(space, spaces.Tuple):
        return [
            item for key, child in enumerate(space.spaces) for item in _shapes(child, (*path, key))
        ]
    return [(path, tuple(space.shape or ()))]


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(key) for key in path)
