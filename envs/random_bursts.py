"""Random-action bursts: now and then an environment executes one random action for a few steps,
whatever the policy chooses.

A policy that is nearly deterministic sees only the states that it seeks out, and may never learn
what to do where a stochastic game throws it. Bursts take it there, as robots in simulation are
pushed so that they learn to recover (Rudin et al., arXiv 2109.11978); that one action is repeated
is from temporally extended exploration (Dabney et al., arXiv 2006.01782). To the learner they
belong to the environment, like sticky actions: it stores the action that the policy chose, and its
objective stays on-policy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.action_space import find_mask, parts
from unirl.core.tree import tree_map
from unirl.envs.config import EnvConfig
from unirl.envs.vector import EnvStep, VectorEnv
from unirl.errors import UniRLError


class RandomBurstEnv:
    """A VectorEnv whose rows have bursts, independently of each other and of their actions."""

    _left: NDArray[np.int64]
    """Steps that are left of each row's burst."""
    _burst_action: Any
    """The action that each row's burst repeats."""

    def __init__(self, env: VectorEnv, config: EnvConfig) -> None:
        self.num_envs, self.hides_first_obs = env.num_envs, env.hides_first_obs
        self.observation_space, self.action_space = env.observation_space, env.action_space
        _require_drawable(env.action_space, config.id)
        if find_mask(env.observation_space) is not None:
            raise UniRLError(
                f'env "{config.id}" cannot have random-action bursts: it masks actions',
                "a burst repeats one action, which a mask may forbid in the next step",
                "set env.random_burst_probability to 0, or env.action_mask to none",
            )
        self._env, self._steps = env, config.random_burst_steps
        self._probability = config.random_burst_probability
        self._begin(0)

    def reset(self, seed: int) -> Any:
        self._begin(seed)
        return self._env.reset(seed)

    def step(self, action: Any) -> EnvStep:
        num, (fewest, most) = self.num_envs, self._steps
        begins = (self._left == 0) & (self._random.random(num) < self._probability)
        # Drawn for all rows, so that what one is given does not depend on the others.
        drawn = self._random.integers(fewest, most, num, endpoint=True), self._draw()
        self._left = np.where(begins, drawn[0], self._left)
        tree_map(partial(_put, rows=begins), self._burst_action, drawn[1])
        random_rows = self._left > 0
        self._left -= random_rows
        if random_rows.any():
            action = tree_map(np.copy, action)
            tree_map(partial(_put, rows=random_rows), action, self._burst_action)
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()

    def _begin(self, seed: int) -> None:
        # Other draws than the environments' seeds, which come of the same number.
        self._random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
        self._left = np.zeros(self.num_envs, dtype=np.int64)
        self._burst_action = self._draw()

    def _draw(self) -> Any:
        return self._draw_of(self.action_space)

    def _draw_of(self, space: Space[Any]) -> Any:
        num = self.num_envs
        if isinstance(space, spaces.Dict | spaces.Tuple):
            return {name: self._draw_of(part) for name, part in parts(space)}
        if isinstance(space, spaces.MultiBinary):
            return self._random.integers(0, 2, (num, *space.shape))
        if isinstance(space, spaces.Discrete):
            return self._random.integers(0, space.n, num)
        if isinstance(space, spaces.MultiDiscrete):
            return self._random.integers(0, space.nvec, (num, *space.nvec.shape))
        assert isinstance(space, spaces.Box)
        shape = (num, *space.shape)
        return self._random.uniform(space.low, space.high, shape).astype(np.float32)


def _put(target: NDArray[Any], source: NDArray[Any], rows: NDArray[np.bool_]) -> None:
    target[rows] = source[rows]


def _require_drawable(space: Space[Any], env_id: str) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for _, part in parts(space):
            _require_drawable(part, env_id)
        return
    bounded = isinstance(space, spaces.Box) and space.is_bounded("both")
    choices = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not bounded and not isinstance(space, choices):
        raise UniRLError(
            f'env "{env_id}" cannot have random-action bursts: its actions are {space}',
            "a random action is drawn: from discrete ones, or from a Box with finite bounds",
            "set env.random_burst_probability to 0",
        )
