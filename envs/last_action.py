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

from unirl.core.errors import UniRLError
from unirl.envs.spaces import action_field
from unirl.envs.vector import EnvStep, VectorEnv

LAST_ACTION = "last_action"
OBS = "obs"
"""What an observation that is no Dict is called beside it."""


class LastActionEnv:
    """A VectorEnv whose observations are Dicts with an entry "last_action": the action that led to
    them, 0 where an episode begins.

    Discrete actions are counted from 0; those of a Box lie within its bounds, as executed. Raises
    UniRLError where the observations have such an entry already.
    """

    def __init__(self, env: VectorEnv, env_id: str) -> None:
        self.num_envs, self.hides_first_obs = env.num_envs, env.hides_first_obs
        self.action_space = env.action_space
        self.observation_space: Space[Any] = with_last_action(
            env.observation_space, env.action_space, env_id
        )
        self._env = env
        self._is_dict = isinstance(env.observation_space, spaces.Dict)
        (_, *self._shape), dtype = action_field(env.action_space, 1, env_id)
        self._dtype = np.float32 if dtype.is_floating_point else np.int64

    def reset(self, seed: int) -> Any:
        """First observations, after no action; see VectorEnv."""
        return self._add(self._env.reset(seed), self._none())

    def step(self, action: NDArray[Any]) -> EnvStep:
        """One step; see VectorEnv."""
        step = self._env.step(action)
        executed = self._executed(action)
        ended = step.terminated | step.truncated
        if not self.hides_first_obs:
            # A filler only led to an episode's first observation.
            executed[~step.mask] = 0
            step.obs = step.acting_obs = self._add(step.obs, executed)
            return step
        # Here a filler's action counted, and the policy acts on the next episode's first
        # observation already.
        acting = executed.copy()
        acting[ended] = 0
        step.obs = self._add(step.obs, executed)
        step.acting_obs = self._add(step.acting_obs, acting) if ended.any() else step.obs
        return step

    def close(self) -> None:
        """See VectorEnv."""
        self._env.close()

    def _executed(self, action: NDArray[Any]) -> NDArray[Any]:
        """A copy, within the bounds of a Box."""
        copy = action.astype(self._dtype)
        if isinstance(self.action_space, spaces.Box):
            np.clip(copy, self.action_space.low, self.action_space.high, out=copy)
        return copy

    def _none(self) -> NDArray[Any]:
        return np.zeros((self.num_envs, *self._shape), self._dtype)

    def _add(self, obs: Any, action: NDArray[Any]) -> dict[str, Any]:
        return {**(obs if self._is_dict else {OBS: obs}), LAST_ACTION: action}


def with_last_action(
    observation_space: Space[Any], action_space: Space[Any], env_id: str
) -> spaces.Dict:
    """The space of observations with the last action; see LastActionEnv."""
    if not isinstance(observation_space, spaces.Dict):
        return spaces.Dict({OBS: observation_space, LAST_ACTION: action_space})
    if LAST_ACTION in observation_space.spaces:
        raise UniRLError(
            f'env "{env_id}" has an observation named {LAST_ACTION!r} already',
            f"env.last_action adds one, found {sorted(observation_space.spaces)}",
            "set env.last_action to false",
        )
    return spaces.Dict({**observation_space.spaces, LAST_ACTION: action_space})
