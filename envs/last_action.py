"""The action executed last as a part of the observation.

Where an environment may repeat it (sticky actions) or moves with inertia, what happens next depends
on it, and one observation does not show it. IMPALA's agent reads it too (Espeholt et al., arXiv
1802.01561, figure 3).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.action_space import parts
from unirl.core.tree import tree_map
from unirl.envs.spaces import Leaf, action_fields
from unirl.envs.vector import EnvStep, VectorEnv
from unirl.envs.view.obs_view import OBS
from unirl.errors import UniRLError

LAST_ACTION = "last_action"


class LastAction:
    """Observations of one environment with an entry "last_action" beside them.

    What is no Dict is found under "obs". Raises UniRLError where the entry exists already.
    """

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], env_id: str
    ) -> None:
        self._is_dict = isinstance(observation_space, spaces.Dict)
        self.observation_space: Space[Any] = _extended(observation_space, action_space, env_id)
        self._action_space = action_space
        self._fields = action_fields(action_space, 1, env_id)

    def none(self, num_envs: int) -> Any:
        """What stands for no action, where episodes begin: 0."""
        return tree_map(lambda leaf: np.zeros((num_envs, *leaf[0][1:]), _dtype(leaf)), self._fields)

    def executed(self, action: Any) -> Any:
        """A copy; that of a Box within its bounds."""
        return _executed(self._action_space, self._fields, action)

    def beside(self, obs: Any, action: Any) -> dict[str, Any]:
        """The tree of arrays [B, ...] with the action that led to it."""
        return {**(obs if self._is_dict else {OBS: obs}), LAST_ACTION: action}


class LastActionEnv:
    """A VectorEnv whose observations show the action that led to them; 0 where episodes begin."""

    def __init__(self, env: VectorEnv, env_id: str) -> None:
        self.num_envs, self.hides_first_obs = env.num_envs, env.hides_first_obs
        self._last = LastAction(env.observation_space, env.action_space, env_id)
        self.observation_space, self.action_space = self._last.observation_space, env.action_space
        self._env = env

    def reset(self, seed: int) -> Any:
        return self._last.beside(self._env.reset(seed), self._last.none(self.num_envs))

    def step(self, action: Any) -> EnvStep:
        step = self._env.step(action)
        executed = self._last.executed(action)
        if not self.hides_first_obs:
            # A filler only led to an episode's first observation.
            tree_map(partial(_clear, rows=~step.mask), executed)
            step.obs = step.acting_obs = self._last.beside(step.obs, executed)
            return step
        # Here a filler's action counted, and after an end the policy acts on the next episode's
        # first observation already.
        acting = tree_map(np.copy, executed)
        tree_map(partial(_clear, rows=step.terminated | step.truncated), acting)
        same = step.acting_obs is step.obs
        step.obs = self._last.beside(step.obs, executed)
        step.acting_obs = step.obs if same else self._last.beside(step.acting_obs, acting)
        return step

    def close(self) -> None:
        self._env.close()


def _executed(space: Space[Any], fields: Any, action: Any) -> Any:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {name: _executed(part, fields[name], action[name]) for name, part in parts(space)}
    copy = action.astype(_dtype(fields))
    if isinstance(space, spaces.Box):
        np.clip(copy, space.low, space.high, out=copy)
    return copy


def _dtype(leaf: Leaf) -> type[Any]:
    return np.float32 if leaf[1].is_floating_point else np.int64


def _clear(action: NDArray[Any], rows: NDArray[np.bool_]) -> None:
    action[rows] = 0


def _extended(observation_space: Space[Any], action_space: Space[Any], env_id: str) -> Space[Any]:
    if not isinstance(observation_space, spaces.Dict):
        return spaces.Dict({OBS: observation_space, LAST_ACTION: action_space})
    if LAST_ACTION in observation_space.spaces:
        raise UniRLError(
            f'env "{env_id}" has an observation named {LAST_ACTION!r} already',
            f"env.last_action adds one, found {sorted(observation_space.spaces)}",
            "set env.last_action to false",
        )
    return spaces.Dict({**observation_space.spaces, LAST_ACTION: action_space})
