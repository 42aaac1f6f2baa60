"""A simulator whose every observation says which environment, episode and step it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.device import CRITIC, POLICY, Groups, SimSpec, SimStep


class ClockSim:
    """N environments with episodes of `length` steps that are cut off, or terminated where the
    environment's index is odd. Observation: environment, episode, step. Reward: 1 + step.

    final: whether final observations are given. critic: a second group, the same times ten. broken:
    (step, environment) at which the state is lost.
    """

    def __init__(
        self,
        num_envs: int = 4,
        length: int = 5,
        *,
        final: bool = True,
        critic: bool = False,
        broken: tuple[int, int] | None = None,
    ) -> None:
        groups = {POLICY: 3, **({CRITIC: 3} if critic else {})}
        self.spec = SimSpec(
            id="torch/Clock",
            num_envs=num_envs,
            observation=groups,
            action_space=spaces.Box(-1, 1, (2,)),
            max_episode_length=length,
            device=torch.device("cpu"),
            step_dt=0.0,
            gives_final_obs=final,
        )
        self._broken, self._critic, self._final = broken, critic, final
        self._nan_states = torch.zeros((), dtype=torch.int64)
        self.actions: list[Tensor] = []

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        num_envs = self.spec.num_envs
        self._episode, self._at, self._num_steps = torch.zeros(num_envs), torch.zeros(num_envs), 0
        return self._obs()

    def step(self, action: Tensor) -> SimStep:
        self.actions.append(action.clone())
        reward = 1 + self._at
        self._at += 1
        over = self._at >= self.spec.max_episode_length
        odd = torch.arange(self.spec.num_envs) % 2 == 1
        valid = torch.ones_like(over)
        if self._broken is not None and self._broken[0] == self._num_steps:
            valid[self._broken[1]] = False
            self._nan_states += 1
        self._num_steps += 1
        final = self._obs()
        lost = ~valid
        done = over | lost
        self._episode += done
        self._at[done] = 0
        return SimStep(
            obs=self._obs(),
            reward=torch.where(valid, reward, 0.0),
            terminated=over & odd & valid,
            truncated=over & ~odd & valid,
            final_obs=final if self._final else None,
            valid=valid,
            extras={},
        )

    def counters(self) -> Mapping[str, Tensor]:
        return {"nan_states": self._nan_states}

    def generators(self) -> Sequence[torch.Generator]:
        return ()

    def close(self) -> None:
        pass

    def _obs(self) -> Groups:
        obs = torch.stack(
            (torch.arange(self.spec.num_envs).float(), self._episode, self._at), dim=1
        )
        return {POLICY: obs, **({CRITIC: obs * 10} if self._critic else {})}
