"""A point mass in a hidden wind: a small task for asymmetric critics and for truncation, since only
the time limit ends its episodes. Our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, Groups, SimSpec, SimStep
from unirl.envs.sim import episodes
from unirl.envs.sim.settings import read_settings

DEFAULTS = {"noise": 0.05, "wind": 1.0}
"""Half-widths of the uniform noise on what the policy sees, and of the wind (m/s^2)."""
LENGTH = 100
TIME_STEP = 0.05
THRUST, DRAG = 4.0, 1.0
"""m/s^2 at action 1; 1/s."""
OFFSET_SPAN, SPEED_SPAN = 1.0, 0.1


class PointMass:
    """N masses in the plane, each to be pushed to its goal and held there against a steady wind.

    State: offset to the goal (m), velocity (m/s) and the episode's wind (m/s^2), two numbers each.
    The group "critic" sees it all; "policy" sees offset and velocity with noise, and no wind.
    Action: two numbers, clipped to [-1, 1]. Reward: 1 / (1 + offset^2), hence 1 at the goal.
    Semi-implicit Euler; episodes end by the time limit only.
    """

    def __init__(self, config: EnvConfig, num_envs: int, device: torch.device) -> None:
        chosen = read_settings(config, DEFAULTS)
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation={POLICY: 4, CRITIC: 6},
            action_space=spaces.Box(-1.0, 1.0, (2,)),
            max_episode_length=config.max_episode_steps or LENGTH,
            device=device,
            step_dt=TIME_STEP,
            follows_stream=True,
            capturable=True,
        )

        def buffer(rows: int) -> Tensor:
            return torch.zeros((rows, num_envs), device=device)

        self.episodes = episodes.new_episodes(num_envs, self.spec.max_episode_length, 10, device)
        # One draw serves both: six numbers for a reset, four for what the policy sees.
        self._noise = buffer(10)
        self._fresh, self._blur = self._noise[:6], self._noise[6:]
        self.state, self._final, self._size = buffer(6), buffer(6), buffer(6)
        self._before, self._after = _parts(self.state), _parts(self._final)
        self._force = buffer(2)
        self._force_columns = self._force.t()
        self._reward, self._size_sum = buffer(2).unbind()
        spans = [OFFSET_SPAN] * 2 + [SPEED_SPAN] * 2 + [chosen["wind"]] * 2 + [chosen["noise"]] * 4
        self._scale = episodes.noise_scale(spans, self.state)
        seen, final = buffer(4), buffer(4)
        self._seen, self._final_seen = seen, final
        self._obs: Groups = {POLICY: seen.t(), CRITIC: self.state.t()}
        self._final_obs: Groups = {POLICY: final.t(), CRITIC: self._final.t()}

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """New episodes everywhere; see DeviceEnv."""
        episodes.begin(self.episodes, seed, random_phases)
        episodes.draw_noise(self.episodes, self._scale, self._noise)
        self.state.copy_(self._fresh)
        torch.add(self.state[:4], self._blur, out=self._seen)
        return self._obs

    def step(self, action: Tensor) -> SimStep:
        """One step; see DeviceEnv."""
        (offset, speed, wind), (new_offset, new_speed, new_wind) = self._before, self._after
        book, reward = self.episodes, self._reward
        torch.clamp(action, -1.0, 1.0, out=self._force_columns)
        force = self._force.mul_(THRUST).add_(wind).sub_(speed, alpha=DRAG)
        torch.add(speed, force, alpha=TIME_STEP, out=new_speed)
        torch.sub(offset, new_speed, alpha=TIME_STEP, out=new_offset)
        new_wind.copy_(wind)

        torch.mul(new_offset, new_offset, out=force)
        torch.add(force[0], force[1], out=reward).add_(1.0).reciprocal_()
        torch.abs(self._final, out=self._size)
        episodes.end_step(book, None, torch.sum(self._size, 0, out=self._size_sum))
        reward.masked_fill_(book.invalid, 0.0)

        self._final.nan_to_num_(0.0, 0.0, 0.0)
        episodes.draw_noise(book, self._scale, self._noise)
        torch.where(book.done, self._fresh, self._final, out=self.state)
        # The same noise in both: where no episode ended, both are one observation.
        torch.add(self._final[:4], self._blur, out=self._final_seen)
        torch.add(self.state[:4], self._blur, out=self._seen)
        return episodes.step_result(book, self._obs, reward, self._final_obs)

    def counters(self) -> Mapping[str, Tensor]:
        """See DeviceEnv."""
        return episodes.counters(self.episodes)

    def generators(self) -> Sequence[torch.Generator]:
        """See DeviceEnv."""
        return (self.episodes.generator,)

    def close(self) -> None:
        """Nothing is held; see DeviceEnv."""


def _parts(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return state[0:2], state[2:4], state[4:6]
