"""Pushes: now and then an environment executes a random action for a few steps, whatever the policy
says.

A policy that is nearly deterministic sees only the states that it seeks out, and may never learn
what to do where a stochastic game throws it. Pushes take it there, as robots in simulation are
pushed so that they learn to recover (Rudin et al., arXiv 2109.11978); that one action is repeated
is from temporally extended exploration (Dabney et al., arXiv 2006.01782). To the learner they are
part of the environment, like sticky actions: it stores the action that the policy chose, and its
objective stays on-policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.envs.vector import EnvStep, VectorEnv
from unirl.errors import UniRLError


class PushedEnv:
    """A VectorEnv whose rows are pushed, independently of each other and of the actions they get.

    probability: per step and row that a push begins where none is on. steps: fewest and most steps
    of one. Raises UniRLError for actions that cannot be drawn at random.
    """

    _left: NDArray[np.int64]
    """Steps that are left of each row's push."""
    _pushing: NDArray[Any]
    """The action that each row's push repeats."""

    def __init__(
        self, env: VectorEnv, probability: float, steps: tuple[int, int], env_id: str
    ) -> None:
        self.num_envs, self.hides_first_obs = env.num_envs, env.hides_first_obs
        self.observation_space, self.action_space = env.observation_space, env.action_space
        require_drawable(env.action_space, env_id)
        self._env, self._probability, self._steps = env, probability, steps
        self._begin(0)

    def reset(self, seed: int) -> Any:
        """New episodes, and pushes that are a function of the seed too; see VectorEnv."""
        self._begin(seed)
        return self._env.reset(seed)

    def step(self, action: NDArray[Any]) -> EnvStep:
        """One step; see VectorEnv."""
        num, (fewest, most) = self.num_envs, self._steps
        begins = (self._left == 0) & (self._random.random(num) < self._probability)
        # Drawn for all rows, so that what one is given does not depend on the others.
        drawn = self._random.integers(fewest, most, num, endpoint=True), self._draw()
        self._left = np.where(begins, drawn[0], self._left)
        self._pushing[begins] = drawn[1][begins]
        pushed = self._left > 0
        self._left -= pushed
        if pushed.any():
            action = action.copy()
            action[pushed] = self._pushing[pushed]
        return self._env.step(action)

    def close(self) -> None:
        """See VectorEnv."""
        self._env.close()

    def _begin(self, seed: int) -> None:
        # Apart from the environments' own seeds, which come of the same number.
        self._random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
        self._left = np.zeros(self.num_envs, dtype=np.int64)
        self._pushing = self._draw()

    def _draw(self) -> NDArray[Any]:
        space, num = self.action_space, self.num_envs
        if isinstance(space, spaces.Discrete):
            return self._random.integers(0, space.n, num)
        if isinstance(space, spaces.MultiDiscrete):
            return self._random.integers(0, space.nvec, (num, *space.nvec.shape))
        assert isinstance(space, spaces.Box)
        shape = (num, *space.shape)
        return self._random.uniform(space.low, space.high, shape).astype(np.float32)


def require_drawable(space: Space[Any], env_id: str) -> None:
    """Raise UniRLError unless a random action can be drawn: discrete ones, and boxes with bounds
    all around.
    """
    bounded = isinstance(space, spaces.Box) and space.is_bounded("both")
    if not bounded and not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        raise UniRLError(
            f'env "{env_id}" cannot be pushed: its actions are {space}',
            "a push draws a random action: discrete ones, or a Box with finite bounds",
            "set env.push_probability to 0",
        )
