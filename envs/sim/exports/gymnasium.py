"""A simulator on a device as a vector environment of Gymnasium that gives tensors, so that other
libraries can be run on the same task."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from unirl.envs.device import POLICY, DeviceEnv, Groups, SimStep


class GymnasiumExport(VectorEnv[Any, Any, Any]):
    """A DeviceEnv with Gymnasium's vector API; all tensors are copies and may be kept.

    One observation group is a tensor, several are a dictionary. In a same-step simulator that has
    them, info["final_obs"] holds the observations before the reset, in every row. A row whose state
    was not finite is truncated at the last observation that was, with reward 0. An action is a
    tensor, or what torch.as_tensor takes.
    """

    def __init__(self, env: DeviceEnv, *, random_phases: bool = False) -> None:
        """random_phases: `reset` draws the steps that the first episodes have behind them."""
        spec = env.spec
        self._same_step = spec.autoreset == "same_step"
        self.metadata = {
            "autoreset_mode": AutoresetMode.SAME_STEP
            if self._same_step
            else AutoresetMode.NEXT_STEP
        }
        self.num_envs = spec.num_envs
        self.single_observation_space = spec.observation_space
        self.single_action_space = spec.action_space
        self.observation_space = batch_space(spec.observation_space, spec.num_envs)
        self.action_space = batch_space(spec.action_space, spec.num_envs)
        self.device = spec.device
        self._env, self._random_phases = env, random_phases
        self._last: Groups = {}
        self._done = torch.zeros(spec.num_envs, dtype=torch.bool, device=spec.device)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """New episodes everywhere. seed: one number for all environments; None: any."""
        if isinstance(seed, list) or options:
            raise ValueError("a simulator on a device takes one seed and no options")
        drawn = int(torch.seed() % 2**31) if seed is None else seed
        self._last = _copy(self._env.reset(drawn, random_phases=self._random_phases))
        self._done.zero_()
        return _tree(self._last), {}

    def step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        step = self._env.step(torch.as_tensor(actions, device=self.device))
        # In a next-step simulator a row that is not valid after an end is the usual filler.
        lost = ~step.valid if self._same_step else ~step.valid & ~self._done
        obs, info = self._observe(step, lost)
        reward = step.reward.masked_fill(~step.valid, 0.0)
        terminated, truncated = step.terminated.clone(), step.truncated | lost
        self._last, self._done = obs, terminated | truncated
        return _tree(obs), reward, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()

    def _observe(self, step: SimStep, lost: Tensor) -> tuple[Groups, dict[str, Any]]:
        obs = _copy(step.obs)
        if not self._same_step:
            return self._kept(obs, lost), {}
        if step.final_obs is None:
            return obs, {}
        final = self._kept(step.final_obs, lost)
        ended = step.terminated | step.truncated | lost
        return obs, {"final_obs": _tree(final), "_final_obs": ended}

    def _kept(self, obs: Groups, lost: Tensor) -> Groups:
        """Last observations that were finite in the rows that are lost."""
        rows = lost.unsqueeze(1)
        return {name: torch.where(rows, self._last[name], group) for name, group in obs.items()}


def _copy(obs: Groups) -> Groups:
    return {name: group.clone() for name, group in obs.items()}


def _tree(obs: Groups) -> Any:
    return obs[POLICY] if len(obs) == 1 else dict(obs)
