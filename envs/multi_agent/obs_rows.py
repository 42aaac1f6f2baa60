"""The observations of many agents: one array per leaf, a row of which is written at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray

from unirl.action_space import ActionMask
from unirl.envs.obs_check import ObsLeaves
from unirl.envs.spaces import obs_reader


class ObsRows:
    """Arrays [B, ...] of one observation space, B being num_rows."""

    def __init__(self, space: Space[Any], num_rows: int, env_id: str) -> None:
        self._num_rows = num_rows
        self._read = obs_reader(space, env_id)
        self._batch: Any = create_empty_array(space, n=num_rows, fn=np.zeros)
        self._leaves = ObsLeaves(space, env_id)
        self._arrays: list[NDArray[Any]] = []
        for path, _ in self._leaves.spaces:
            array: Any = self._batch
            for key in path:
                array = array[key]
            self._arrays.append(array)

    def read(self) -> Any:
        """The tree of arrays [B, ...] for the slot."""
        return self._read(self._batch, self._num_rows)

    def write(self, row: int, obs: Any) -> None:
        """Copy one agent's observation in; UniRLError when it does not fit the space."""
        for array, leaf in zip(self._arrays, self._leaves.of(obs), strict=True):
            array[row] = leaf

    def clear(self, row: int) -> None:
        """What an agent sees that is not there: 0, or where a Discrete space starts; it may do
        anything.
        """
        for array, (_, space) in zip(self._arrays, self._leaves.spaces, strict=True):
            array[row] = 1 if isinstance(space, ActionMask) else getattr(space, "start", 0)
