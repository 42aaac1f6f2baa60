"""A simulator whose numbers can be foretold, in either autoreset mode, for tests of what wraps a
DeviceEnv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.device import CRITIC, POLICY, Groups, SimSpec, SimStep


class Countdown:
    """Row i counts its steps; the observation is [i, steps], the reward the new count.

    An episode terminates after `terminate_after` steps or is truncated after `truncate_after`. An
    action above 0.5 makes the state of its row not a number; with `heals` the row is reset, without
    it stays as it is. Tensors are overwritten by each step.
    """

    def __init__(
        self,
        num_envs: int,
        terminate_after: int = 99,
        truncate_after: int = 99,
        autoreset: Literal["same_step", "next_step"] = "same_step",
        gives_final_obs: bool = True,
        critic: bool = False,
        heals: bool = True,
    ) -> None:
        self.spec = SimSpec(
            id="test/Countdown",
            num_envs=num_envs,
            observation={POLICY: 2, CRITIC: 2} if critic else {POLICY: 2},
            action_space=spaces.Box(-1.0, 1.0, (1,)),
            max_episode_length=truncate_after,
            device=torch.device("cpu"),
            step_dt=0.1,
            autoreset=autoreset,
            gives_final_obs=gives_final_obs,
        )
        self.closed = 0
        self._heals = heals
        self._broken = torch.zeros(num_envs, dtype=torch.bool)
        self._limits = terminate_after, truncate_after
        self._rows = torch.arange(num_envs)
        self._steps = torch.zeros(num_envs, dtype=torch.int64)
        self._due = torch.zeros(num_envs, dtype=torch.bool)
        self._obs, self._final = self._buffers(), self._buffers()
        self._lost = torch.zeros((), dtype=torch.int64)

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        self._steps.fill_(seed % 2 if random_phases else 0)
        self._due.zero_()
        self._broken.zero_()
        return self._write(self._obs, self._steps)

    def step(self, action: Tensor) -> SimStep:
        same_step = self.spec.autoreset == "same_step"
        lost = (action[:, 0] > 0.5) & ~self._due | self._broken
        if not self._heals:
            self._broken = lost
        valid = ~lost & ~self._due
        new = self._steps + 1
        terminated = (new == self._limits[0]) & valid
        truncated = (new == self._limits[1]) & valid & ~terminated
        ended = terminated | truncated
        self._lost += lost.sum()
        if same_step:
            self._steps = torch.where(ended | lost, 0, new)
        else:
            self._steps = torch.where(self._due | lost, 0, new)
            self._due = ended
        final = self._write(self._final, torch.where(lost, 0, new)) if same_step else None
        return SimStep(
            obs=self._write(self._obs, self._steps),
            reward=torch.where(valid, new, torch.nan).float(),
            terminated=terminated,
            truncated=truncated,
            final_obs=final if self.spec.gives_final_obs else None,
            valid=valid,
            extras={},
        )

    def counters(self) -> Mapping[str, Tensor]:
        return {"nan_states": self._lost}

    def generators(self) -> Sequence[torch.Generator]:
        return ()

    def close(self) -> None:
        self.closed += 1

    def _buffers(self) -> Groups:
        return {
            name: torch.zeros(self.spec.num_envs, size)
            for name, size in self.spec.observation.items()
        }

    def _write(self, out: Groups, steps: Tensor) -> Groups:
        for name, group in out.items():
            group[:, 0] = self._rows
            group[:, 1] = steps * (10 if name == CRITIC else 1)
            group[self._broken] = torch.nan
        return out
