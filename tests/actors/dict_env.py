"""An environment with nested observations for tests of other processes, which import it by name."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


class Nested(gymnasium.Env[Any, Any]):
    """Observations from its seed and actions; episodes of 7 steps, every other one truncated."""

    def __init__(self) -> None:
        self.observation_space = Dict({"where": Box(-1, 1, (2,), np.float32), "what": Discrete(4)})
        self.action_space = Box(-1, 1, (2,), np.float32)
        self._step = self._episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step, self._episode = 0, self._episode + 1
        return self._obs(0.0), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        over, odd = self._step % 7 == 0, self._episode % 2 == 1
        return self._obs(float(action[0])), float(action[1]), over and odd, over and not odd, {}

    def _obs(self, shift: float) -> Any:
        where = (self.np_random.uniform(-1, 1, 2) / 2 + shift / 4).astype(np.float32)
        return {"where": where.clip(-1, 1), "what": int(self.np_random.integers(4))}


if "unirl-test/Nested-v0" not in gymnasium.registry:
    gymnasium.register("unirl-test/Nested-v0", Nested)
