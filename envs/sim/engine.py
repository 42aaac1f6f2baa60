"""A simulator on the CPU as an engine of `make_vec`: the same ids then work with every sampler and
with the evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from unirl.envs.device import POLICY, DeviceEnv, Groups
from unirl.envs.vector import Bools, EngineStep
from unirl.errors import UniRLError

Observations = dict[str, NDArray[Any]]


class SimEngine:
    """A DeviceEnv as a VectorEngine, with next-step autoreset.

    One observation group is an array, several are a dictionary of arrays. A row whose state was not
    finite is reported as truncated at the last observation that was, with reward 0: to learn from
    it does no harm, and the episode is over.

    A simulator that resets within the step cannot let one row wait, so the filler row behind an end
    hides the next episode's first step, taken with action 0 where actions are numbers: for episodes
    of n steps this loses one transition in n. Policies with memory and environment workers need
    this form; a sampler on the device needs neither, and loses nothing.
    """

    autoreset_mode = AutoresetMode.NEXT_STEP

    def __init__(self, env: DeviceEnv) -> None:
        spec = env.spec
        self._same_step = spec.autoreset == "same_step"
        if self._same_step and not spec.gives_final_obs:
            env.close()
            raise UniRLError(
                f'env "{spec.id}" does not give the observations its episodes end with',
                "a simulator that resets within the step must give final observations here",
                "switch them on in env.kwargs, or use a simulator that gives them",
            )
        self._env = env
        self.observation_space: Space[Any] = spec.observation_space
        self.action_space: Space[Any] = spec.action_space
        self._zeroes_actions = self._same_step and isinstance(spec.action_space, spaces.Box)
        self._last: Observations = {}
        self._done: Bools = np.zeros(spec.num_envs, dtype=np.bool_)

    def reset(self, seed: int) -> Any:
        self._last = _copy(self._env.reset(seed))
        self._done = np.zeros_like(self._done)
        return self._tree(self._last)

    def step(self, action: NDArray[Any]) -> EngineStep:
        if self._zeroes_actions and self._done.any():
            action = action.copy()
            action[self._done] = 0.0
        step = self._env.step(torch.from_numpy(action).to(self._env.spec.device))
        obs = _copy(step.obs)
        valid, terminated = step.valid.cpu().numpy(), step.terminated.cpu().numpy().copy()
        truncated = step.truncated.cpu().numpy().copy()
        ended = terminated | truncated
        if self._same_step and ended.any() and step.final_obs is not None:
            _put_rows(obs, ended, _copy(step.final_obs))
        if not valid.all():
            # In a next-step simulator a row that is not valid after an end is the usual filler. A
            # row that was lost may not have been reset yet: nobody must see what it holds.
            lost = ~valid & ~_finite(obs)
            lost |= ~valid if self._same_step else ~valid & ~self._done
            _put_rows(obs, lost, self._last)
            truncated |= lost
        reward = np.where(valid, step.reward.cpu().numpy(), np.float32(0))
        self._last, self._done = obs, terminated | truncated
        return self._tree(obs), reward, terminated, truncated, {}

    def close(self) -> None:
        self._env.close()

    def _tree(self, obs: Observations) -> Any:
        return obs[POLICY] if len(obs) == 1 else obs


def _copy(obs: Groups) -> Observations:
    """device -> host, once per step; the simulator overwrites its tensors."""
    return {name: np.array(group.cpu().numpy(), order="C") for name, group in obs.items()}


def _put_rows(obs: Observations, rows: Bools, source: Observations) -> None:
    for name, group in obs.items():
        group[rows] = source[name][rows]


def _finite(obs: Observations) -> Bools:
    rows: Bools = np.logical_and.reduce([np.isfinite(group).all(1) for group in obs.values()])
    return rows
