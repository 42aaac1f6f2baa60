"""A point mass in a hidden wind: a small task for asymmetric critics and for truncation, since only
the time limit ends its episodes."""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, Groups
from unirl.envs.sim.settings import read_numbers
from unirl.envs.sim.torch.env import TorchTask, World

DEFAULTS = {"noise": 0.05, "wind": 1.0}
"""Half-widths of the uniform noise on what the policy sees, and of the wind (m/s^2)."""
TIME_STEP = 0.05
THRUST, DRAG = 4.0, 1.0
"""m/s^2 at action 1; 1/s."""
OFFSET_SPAN, SPEED_SPAN = 1.0, 0.1


def point_mass(config: EnvConfig) -> TorchTask:
    """N masses in the plane, each to be moved to its goal and held there against a steady wind.

    State: offset to the goal (m), velocity (m/s) and the episode's wind (m/s^2), two numbers each.
    The group "critic" sees it all; "policy" sees offset and velocity with noise, and no wind.
    Action: two numbers, clipped to [-1, 1]. Reward: 1 / (1 + offset^2), hence 1 at the goal.
    Semi-implicit Euler; episodes end by the time limit only.
    """
    chosen = read_numbers(config, DEFAULTS)
    spans = [OFFSET_SPAN] * 2 + [SPEED_SPAN] * 2 + [chosen["wind"]] * 2 + [chosen["noise"]] * 4
    return TorchTask(
        observation={POLICY: 4, CRITIC: 6},
        action_space=spaces.Box(-1.0, 1.0, (2,)),
        max_episode_length=100,
        step_dt=TIME_STEP,
        state_size=6,
        spans=spans,  # one draw serves both: six numbers for a reset, four for what is seen
        motion=PointMassMotion,
    )


class PointMassMotion:
    """The noise of an observation is the same in obs and final_obs: where no episode ended, both
    are one observation."""

    def __init__(self, world: World) -> None:
        self._world, self._blur = world, world.noise[6:]
        self._rows = tuple(buffer.view(3, 2, -1).unbind() for buffer in (world.state, world.after))
        self._force = world.buffer(2)
        self._force_columns = self._force.t()
        self._seen, self._final = world.buffer(4), world.buffer(4)
        self.obs: Groups = {POLICY: self._seen.t(), CRITIC: world.state.t()}
        self.final_obs: Groups = {POLICY: self._final.t(), CRITIC: world.after.t()}

    def move(self, action: Tensor) -> None:
        (offset, speed, wind), (new_offset, new_speed, new_wind) = self._rows
        torch.clamp(action, -1.0, 1.0, out=self._force_columns)
        force = self._force.mul_(THRUST).add_(wind).sub_(speed, alpha=DRAG)
        torch.add(speed, force, alpha=TIME_STEP, out=new_speed)
        torch.sub(offset, new_speed, alpha=TIME_STEP, out=new_offset)
        new_wind.copy_(wind)

    def score(self) -> Tensor | None:
        offset, squares = self._rows[1][0], self._force
        torch.mul(offset, offset, out=squares)
        torch.add(squares[0], squares[1], out=self._world.reward).add_(1.0).reciprocal_()
        return None

    def observe(self) -> None:
        torch.add(self._world.after[:4], self._blur, out=self._final)
        torch.add(self._world.state[:4], self._blur, out=self._seen)
