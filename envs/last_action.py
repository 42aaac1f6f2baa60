"""The action executed last as a part of the observation.

Where an environment may repeat it (sticky actions) or moves with inertia, what happens next depends
on it, and one observation does not show it. IMPALA's agent reads it too (Espeholt et al., arXiv
1802.01561, figure 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.envs.spaces import action_field
from unirl.envs.vector import EnvStep, VectorEnv
from unirl.errors import UniRLError

LAST_ACTION = "last_action"
OBS = "obs"
"""What an observation that is no Dict is called beside it."""


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
        (_, *self._shape), dtype = action_field(action_space, 1, env_id)
        self._dtype = np.float32 if dtype.is_floating_point else np.int64

    def none(self, num_envs: int) -> NDArray[Any]:
        """What stands for no action, where episodes begin: 0."""
        return np.zeros((num_envs, *self._shape), self._dtype)

    def executed(self, action: NDArray[Any]) -> NDArray[Any]:
        """A copy; that of a Box within its bounds."""
        copy = action.astype(self._dtype)
        if isinstance(self._action_space, spaces.Box):
            np.clip(copy, self._action_space.low, self._action_space.high, out=copy)
        return copy

    def beside(self, obs: Any, action: NDArray[Any]) -> dict[str, Any]:
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

    def step(self, action: NDArray[Any]) -> EnvStep:
        step = self._env.step(action)
        executed = self._last.executed(action)
        if not self.hides_first_obs:
            # A filler only led to an episode's first observation.
            executed[~step.mask] = 0
            step.obs = step.acting_obs = self._last.beside(step.obs, executed)
            return step
        # Here a filler's action counted, and after an end the policy acts on the next episode's
        # first observation already.
        acting = executed.copy()
        acting[step.terminated | step.truncated] = 0
        same = step.acting_obs is step.obs
        step.obs = self._last.beside(step.obs, executed)
        step.acting_obs = step.obs if same else self._last.beside(step.acting_obs, acting)
        return step

    def close(self) -> None:
        self._env.close()


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
