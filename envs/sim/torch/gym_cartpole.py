"""Gymnasium's CartPole-v1 for N environments at once, equal to it step for step
(gymnasium/envs/classic_control/cartpole.py; Barto, Sutton and Anderson 1983)."""

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

LENGTH = 500
GRAVITY, TIME_STEP, FORCE = 9.8, 0.02, 10.0
POLE_MASS, TOTAL_MASS, HALF_LENGTH = 0.1, 1.1, 0.5
RESET_SPAN = 0.05
LIMITS = (2.4, 12 * 2 * math.pi / 360)
"""Distance from the middle in metres and angle in radians beyond which an episode terminates."""


class GymCartpole:
    """N carts, each pushed with 10 N to the left (action 0) or to the right (action 1).

    Observation: cart position, its velocity, pole angle, its velocity. Reward: 1 at each step.
    The state is float64 and every product is formed in Gymnasium's order, so that no rounding
    tells the two apart; observations are float32 as there. State is [4, N]: see torch/Cartpole.
    """

    def __init__(self, config: EnvConfig, num_envs: int, device: torch.device) -> None:
        read_settings(config, {})
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation={POLICY: 4},
            action_space=spaces.Discrete(2),
            max_episode_length=config.max_episode_steps or LENGTH,
            device=device,
            step_dt=TIME_STEP,
            follows_stream=True,
            capturable=True,
        )

        def buffer(rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros((rows, num_envs), dtype=dtype, device=device)

        self.episodes = episodes.new_episodes(num_envs, self.spec.max_episode_length, 4, device)
        self.state, self._next, self._noise, self._size = (buffer(4) for _ in range(4))
        self._rows, self._slopes = self.state.unbind(), buffer(4)
        self._slope_rows = self._slopes.unbind()
        self._scratch = buffer(6).unbind()
        self._over = buffer(2, torch.bool)
        self._over_rows = self._over.unbind()
        self._limits = torch.tensor(LIMITS, dtype=torch.float64, device=device).unsqueeze(1)
        self._scale = episodes.noise_scale([RESET_SPAN] * 4, self.state)
        self._reward = buffer(1, torch.float32)[0]
        seen, final = buffer(4, torch.float32), buffer(4, torch.float32)
        self._seen, self._final = seen, final
        self._obs: Groups = {POLICY: seen.t()}
        self._final_obs: Groups = {POLICY: final.t()}

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """New episodes everywhere; see DeviceEnv."""
        episodes.begin(self.episodes, seed, random_phases)
        episodes.draw_noise(self.episodes, self._scale, self.state)
        self._seen.copy_(self.state)
        return self._obs

    def step(self, action: Tensor) -> SimStep:
        """One step; see DeviceEnv."""
        self._find_slopes(action)
        after, book = self._next, self.episodes
        torch.mul(self._slopes, TIME_STEP, out=after).add_(self.state)

        torch.abs(after, out=self._size)
        torch.gt(self._size[0::2], self._limits, out=self._over)
        failed = self._over_rows[0].logical_or_(self._over_rows[1])
        episodes.end_step(book, failed, torch.sum(self._size, 0, out=self._scratch[0]))
        self._reward.copy_(book.valid)

        self._final.copy_(after.nan_to_num_(0.0, 0.0, 0.0))
        episodes.draw_noise(book, self._scale, self._noise)
        torch.where(book.done, self._noise, after, out=self.state)
        self._seen.copy_(self.state)
        return episodes.step_result(book, self._obs, self._reward, self._final_obs)

    def counters(self) -> Mapping[str, Tensor]:
        """See DeviceEnv."""
        return episodes.counters(self.episodes)

    def generators(self) -> Sequence[torch.Generator]:
        """See DeviceEnv."""
        return (self.episodes.generator,)

    def close(self) -> None:
        """Nothing is held; see DeviceEnv."""

    def _find_slopes(self, action: Tensor) -> None:
        """Time derivatives of the state. With the pole's first moment P = m l and total mass M:
        temp = (force + P w^2 sin) / M,
        w' = (g sin - cos temp) / (l (4/3 - m cos^2 / M)),   v' = temp - P w' cos / M.
        """
        force, sin, cos, temp, product, pull = self._scratch
        _, speed, angle, turning = self._rows
        x_slope, speed_slope, angle_slope, turning_slope = self._slope_rows
        x_slope.copy_(speed)
        angle_slope.copy_(turning)
        force.copy_(action).mul_(2 * FORCE).sub_(FORCE)
        torch.sin(angle, out=sin)
        torch.cos(angle, out=cos)
        torch.mul(turning, turning, out=temp).mul_(_MOMENT).mul_(sin).add_(force).div_(TOTAL_MASS)
        torch.mul(cos, cos, out=pull).mul_(POLE_MASS).div_(TOTAL_MASS)
        pull.neg_().add_(4.0 / 3.0).mul_(HALF_LENGTH)
        torch.mul(sin, GRAVITY, out=turning_slope).sub_(torch.mul(cos, temp, out=product))
        turning_slope.div_(pull)
        torch.mul(turning_slope, _MOMENT, out=product).mul_(cos).div_(TOTAL_MASS)
        torch.sub(temp, product, out=speed_slope)


_MOMENT = POLE_MASS * HALF_LENGTH
