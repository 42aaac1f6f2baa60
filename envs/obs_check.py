"""Keeps broken observations out of slots: shapes are checked at every step, finiteness once per
unroll."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces

from unirl.core.tree import Tree, leaves
from unirl.envs.guard import check_flags, wrong_number
from unirl.envs.spaces import wrong_shape
from unirl.errors import UniRLError

Path = tuple[Any, ...]


class ObsLeaves:
    """The leaves of one environment's observations, checked against its space."""

    def __init__(self, space: Space[Any], env_id: str) -> None:
        self._space, self._env_id = space, env_id
        self.spaces = list(_leaf_spaces(space, ()))
        """Path and space of each leaf."""
        self._shapes = [(path, tuple(leaf.shape or ())) for path, leaf in self.spaces]

    def of(self, obs: Any) -> list[Any]:
        """The leaves of `obs` in that order; UniRLError where it does not fit the space."""
        return [self._leaf(obs, path, shape) for path, shape in self._shapes]

    def _leaf(self, obs: Any, path: Path, shape: tuple[int, ...]) -> Any:
        leaf = obs
        try:
            for key in path:
                leaf = leaf[key]
        except (KeyError, IndexError, TypeError) as error:
            raise UniRLError(
                f'env "{self._env_id}" returned an observation without {_name(path)}',
                f"the observation space is {self._space}, received {type(obs).__name__}",
                "correct the environment's observation_space or its observations",
            ) from error
        received = np.shape(leaf)
        if received != shape:
            where = f" ({_name(path)})" if path else ""
            raise wrong_shape(self._env_id, shape, received, where)
        return leaf


class ShapeCheck(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks one environment's observations before a vector engine stacks them: UniRLError where
    one does not fit the space."""

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        super().__init__(env)
        self._leaves, self._env_id = ObsLeaves(env.observation_space, env_id), env_id

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise wrong_number(self._env_id, "reset", "(observation, info)", result)
        self._leaves.of(result[0])
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        try:
            obs, reward, terminated, truncated, _ = result
        except (TypeError, ValueError):
            expected = "(observation, reward, terminated, truncated, info)"
            raise wrong_number(self._env_id, "step", expected, result) from None
        # What most environments return needs no closer look.
        if not (type(reward) is float and type(terminated) is bool and type(truncated) is bool):
            check_flags(self._env_id, reward, terminated, truncated)
        self._leaves.of(obs)
        return result


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


def _leaf_spaces(space: Space[Any], path: Path) -> Iterator[tuple[Path, Space[Any]]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children: Any = space.spaces
        for key in children if isinstance(children, dict) else range(len(children)):
            yield from _leaf_spaces(children[key], (*path, key))
    else:
        yield path, space


def _name(path: Path) -> str:
    return "/".join(str(key) for key in path)
