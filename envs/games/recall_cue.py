"""A memory task with a known best return: a cue to recall."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

Obs = NDArray[np.float32]
Info = dict[str, Any]


class RecallCue(gymnasium.Env[Obs, np.int64]):
    """A cue is shown at the first step only; naming it at the last of `length` steps earns 1,
    anything else 0.

    Observation [num_cues + 1]: the cue one-hot at the first step, then zeros; the last entry is 1
    where the answer is due. Actions before that do nothing. Without memory the best mean return is
    1 / num_cues, with it 1.
    """

    def __init__(self, length: int = 8, num_cues: int = 3) -> None:
        self.observation_space = Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.action_space = Discrete(num_cues)
        self._length, self._num_cues = length, num_cues
        self._cue = self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(self._num_cues)), 0
        return self._obs(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, Info]:
        self._step += 1
        over = self._step == self._length
        return self._obs(), float(over and int(action) == self._cue), over, False, {}

    def _obs(self) -> Obs:
        obs = np.zeros(self._num_cues + 1, dtype=np.float32)
        if self._step == 0:
            obs[self._cue] = 1.0
        obs[-1] = float(self._step == self._length - 1)
        return obs
