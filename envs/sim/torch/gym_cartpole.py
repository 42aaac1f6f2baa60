"""Gymnasium's CartPole-v1 for N environments at once, equal to it step for step
(gymnasium/envs/classic_control/cartpole.py; Barto, Sutton and Anderson 1983)."""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY, Groups
from unirl.envs.sim.settings import read_numbers
from unirl.envs.sim.torch.env import TorchTask, World

GRAVITY, TIME_STEP, FORCE = 9.8, 0.02, 10.0
POLE_MASS, TOTAL_MASS, HALF_LENGTH = 0.1, 1.1, 0.5
RESET_SPAN = 0.05
LIMITS = (2.4, 12 * 2 * math.pi / 360)
"""Distance from the middle in metres and angle in radians beyond which an episode terminates."""
_MOMENT = POLE_MASS * HALF_LENGTH


def gym_cartpole(config: EnvConfig) -> TorchTask:
    """N carts, each moved with 10 N to the left (action 0) or to the right (action 1).

    Observation: cart position, its velocity, pole angle, its velocity. Reward: 1 at each step.
    The state is float64 and every product is formed in Gymnasium's order, so that no rounding
    tells the two apart; observations are float32 as there.
    """
    read_numbers(config, {})
    return TorchTask(
        observation={POLICY: 4},
        action_space=spaces.Discrete(2),
        max_episode_length=500,
        step_dt=TIME_STEP,
        state_size=4,
        spans=[RESET_SPAN] * 4,
        motion=GymCartpoleMotion,
        dtype=torch.float64,
    )


class GymCartpoleMotion:
    """Euler's method on the derivatives below."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rows, self._slopes = world.state.unbind(), world.buffer(4, torch.float64)
        self._slope_rows = self._slopes.unbind()
        self._scratch = world.buffer(6, torch.float64).unbind()
        self._over = world.buffer(2, torch.bool)
        self._over_rows = self._over.unbind()
        limits = torch.tensor(LIMITS, dtype=torch.float64, device=world.device)
        self._limits = limits.unsqueeze(1)
        self._seen, self._final = world.buffer(4), world.buffer(4)
        self.obs: Groups = {POLICY: self._seen.t()}
        self.final_obs: Groups = {POLICY: self._final.t()}

    def move(self, action: Tensor) -> None:
        self._find_slopes(action)
        torch.mul(self._slopes, TIME_STEP, out=self._world.after).add_(self._world.state)

    def score(self) -> Tensor | None:
        self._world.reward.fill_(1.0)
        torch.gt(self._world.size[0::2], self._limits, out=self._over)
        return self._over_rows[0].logical_or_(self._over_rows[1])

    def observe(self) -> None:
        self._final.copy_(self._world.after)
        self._seen.copy_(self._world.state)

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
