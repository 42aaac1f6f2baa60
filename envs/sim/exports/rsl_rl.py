"""A simulator on a device as the vector environment that rsl_rl 5.5 trains on, so that both can be
run on one task (github.com/leggedrobotics/rsl_rl, rsl_rl/env/vec_env.py). Needs tensordict, which
comes with rsl_rl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.device import DeviceEnv, Groups
from unirl.envs.sim.episodes import Episodes
from unirl.errors import UniRLError

if TYPE_CHECKING:
    from tensordict import TensorDict


class RslRlExport:
    """A DeviceEnv with the members of rsl_rl's VecEnv, whose class it need not inherit.

    Observations are a TensorDict of the groups, copied at each step. extras["time_outs"] marks the
    ends that are no failures: rsl_rl bootstraps them with the value of the observation before. A
    row whose state was not finite is one of them, with reward 0.
    """

    def __init__(self, env: DeviceEnv, seed: int = 1) -> None:
        spec = env.spec
        if not isinstance(spec.action_space, spaces.Box) or len(spec.action_space.shape) != 1:
            raise UniRLError(
                f'env "{spec.id}" cannot be given to rsl_rl',
                f"its actions must be a vector of numbers, found {spec.action_space}",
                "choose a task with continuous actions",
            )
        if spec.autoreset != "same_step":
            raise UniRLError(
                f'env "{spec.id}" cannot be given to rsl_rl',
                "it resets at the next step, and rsl_rl would train on the filler rows",
                "choose a simulator that resets within the step",
            )
        self.num_envs = spec.num_envs
        self.num_actions = spec.action_space.shape[0]
        self.max_episode_length = spec.max_episode_length
        self.device = spec.device
        self.step_dt = spec.step_dt
        self.cfg: dict[str, Any] = {"id": spec.id, "num_envs": spec.num_envs, "seed": seed}
        self._env = env
        episodes = getattr(env, "episodes", None)
        self._episodes = episodes if isinstance(episodes, Episodes) else None
        self._steps = torch.zeros(spec.num_envs, dtype=torch.int64, device=spec.device)
        self._obs = self._pack(env.reset(seed))

    @property
    def unwrapped(self) -> RslRlExport:
        """Itself: rsl_rl looks here for step_dt."""
        return self

    @property
    def episode_length_buf(self) -> Tensor:
        """int64 [N]: steps taken in the present episodes. rsl_rl sets it to random phases before it
        trains; UniRLError where the simulator's own steps cannot be set."""
        return self._steps if self._episodes is None else self._episodes.steps

    @episode_length_buf.setter
    def episode_length_buf(self, steps: Tensor) -> None:
        if self._episodes is None:
            raise UniRLError(
                f'env "{self.cfg["id"]}" does not let its episode steps be set',
                "only a simulator that keeps unirl.envs.sim.episodes does",
                "train with init_at_random_ep_len=False",
            )
        self._episodes.steps.copy_(steps)

    def get_observations(self) -> TensorDict:
        return self._obs

    def reset(self) -> tuple[TensorDict, dict[str, Any]]:
        """New episodes everywhere, the same as at the beginning."""
        self._steps.zero_()
        self._obs = self._pack(self._env.reset(self.cfg["seed"]))
        return self._obs, {}

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Observations, rewards [N], dones (int64 [N]), extras; actions: [N, num_actions]."""
        step = self._env.step(actions)
        lost = ~step.valid
        time_outs = step.truncated | lost
        done = step.terminated | time_outs
        self._steps.add_(1).masked_fill_(done, 0)
        self._obs = self._pack(step.obs)
        reward = step.reward.masked_fill(lost, 0.0)
        return self._obs, reward, done.long(), {"time_outs": time_outs}

    def close(self) -> None:
        self._env.close()

    def _pack(self, obs: Groups) -> TensorDict:
        from tensordict import TensorDict

        # Copies: rsl_rl stores the observation of an action after the next step was taken.
        copies = {name: group.clone() for name, group in obs.items()}
        return TensorDict(copies, batch_size=[self.num_envs], device=self.device)
