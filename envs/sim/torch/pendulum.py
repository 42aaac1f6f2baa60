"""Gymnasium's Pendulum-v1 for N environments at once, in float32
(gymnasium/envs/classic_control/pendulum.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY, Groups, SimSpec, SimStep
from unirl.envs.sim import episodes
from unirl.envs.sim.settings import read_settings

DEFAULTS = {"gravity": 10.0}
"""m/s^2."""
LENGTH = 200
TIME_STEP = 0.05
TORQUE_LIMIT, SPEED_LIMIT = 2.0, 8.0
RESET_SPANS = (math.pi, 1.0)


class Pendulum:
    """N rods of 1 m and 1 kg, hinged at one end, to be swung up and held by a torque.

    Observation: cosine and sine of the angle from upright, and its velocity. Action: a torque,
    clipped to [-2, 2] N m. Reward: -(angle^2 + 0.1 velocity^2 + 0.001 torque^2), of the state that
    the action was taken in. Episodes end by the time limit only.
    """

    def __init__(self, config: EnvConfig, num_envs: int, device: torch.device) -> None:
        chosen = read_settings(config, DEFAULTS)
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation={POLICY: 3},
            action_space=spaces.Box(-TORQUE_LIMIT, TORQUE_LIMIT, (1,)),
            max_episode_length=config.max_episode_steps or LENGTH,
            device=device,
            step_dt=TIME_STEP,
            follows_stream=True,
            capturable=True,
        )

        def buffer(rows: int) -> Tensor:
            return torch.zeros((rows, num_envs), device=device)

        self.episodes = episodes.new_episodes(num_envs, self.spec.max_episode_length, 2, device)
        self.state, self._next, self._noise, self._size = (buffer(2) for _ in range(4))
        self._rows, self._next_rows = self.state.unbind(), self._next.unbind()
        self._torque, self._work = buffer(2).unbind()
        self._reward, self._size_sum = buffer(2).unbind()
        self._scale = episodes.noise_scale(RESET_SPANS, self.state)
        self._pull = 3 * chosen["gravity"] / 2 * TIME_STEP
        seen, final = buffer(3), buffer(3)
        self._seen, self._final = seen.unbind(), final.unbind()
        self._obs: Groups = {POLICY: seen.t()}
        self._final_obs: Groups = {POLICY: final.t()}

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """New episodes everywhere; see DeviceEnv."""
        episodes.begin(self.episodes, seed, random_phases)
        episodes.draw_noise(self.episodes, self._scale, self.state)
        _observe(self._rows, self._seen)
        return self._obs

    def step(self, action: Tensor) -> SimStep:
        """One step; see DeviceEnv."""
        (angle, speed), (new_angle, new_speed) = self._rows, self._next_rows
        torque, work, reward, book = self._torque, self._work, self._reward, self.episodes
        torch.clamp(action[:, 0], -TORQUE_LIMIT, TORQUE_LIMIT, out=torque)
        torch.add(angle, math.pi, out=work).remainder_(2 * math.pi).sub_(math.pi)
        torch.mul(work, work, out=reward).neg_()
        reward.addcmul_(speed, speed, value=-0.1).addcmul_(torque, torque, value=-0.001)

        torch.sin(angle, out=work).mul_(self._pull)
        torch.add(speed, work, out=new_speed).add_(torque, alpha=3 * TIME_STEP)
        new_speed.clamp_(-SPEED_LIMIT, SPEED_LIMIT)
        torch.add(angle, new_speed, alpha=TIME_STEP, out=new_angle)

        torch.abs(self._next, out=self._size)
        episodes.end_step(book, None, torch.sum(self._size, 0, out=self._size_sum))
        reward.masked_fill_(book.invalid, 0.0)
        self._next.nan_to_num_(0.0, 0.0, 0.0)
        _observe(self._next_rows, self._final)
        episodes.draw_noise(book, self._scale, self._noise)
        torch.where(book.done, self._noise, self._next, out=self.state)
        _observe(self._rows, self._seen)
        return episodes.step_result(book, self._obs, reward, self._final_obs)

    def counters(self) -> Mapping[str, Tensor]:
        """See DeviceEnv."""
        return episodes.counters(self.episodes)

    def generators(self) -> Sequence[torch.Generator]:
        """See DeviceEnv."""
        return (self.episodes.generator,)

    def close(self) -> None:
        """Nothing is held; see DeviceEnv."""


def _observe(state: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
    angle, speed = state
    torch.cos(angle, out=out[0])
    torch.sin(angle, out=out[1])
    out[2].copy_(speed)
