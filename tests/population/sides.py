"""An environment that is learned in a few updates: say on which side of zero a number is.

Importing this module registers it (env.import_module).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

Obs = NDArray[np.float32]
LENGTH = 8
"""Steps of an episode, and its largest return; guessing has half of it."""


class Sides(GymVectorEnv[Obs, NDArray[np.int64], Obs]):
    """All episodes begin and end together."""

    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._random = np.random.default_rng(0)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(seed if isinstance(seed, int) else seed[0])
        self._steps = 0
        return self._observe(), {}

    def step(self, actions: NDArray[np.int64]) -> tuple[Obs, Any, Any, Any, dict[str, Any]]:
        is_over, zeros = self._steps == LENGTH, np.zeros(self.num_envs, dtype=np.bool_)
        self._steps = 0 if is_over else self._steps + 1
        reward = np.zeros(self.num_envs) if is_over else self._is_right(actions)
        ends = np.full(self.num_envs, self._steps == LENGTH)
        return self._observe(), reward, ends, zeros, {}

    def _is_right(self, actions: NDArray[np.int64]) -> NDArray[np.float64]:
        return (actions == (self._seen[:, 0] > 0)).astype(np.float64)

    def _observe(self) -> Obs:
        self._seen = self._random.standard_normal((self.num_envs, 3)).astype(np.float32)
        return self._seen


gymnasium.register("toy/Sides-v0", vector_entry_point=Sides, entry_point=None)
