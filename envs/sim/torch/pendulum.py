"""Gymnasium's Pendulum-v1 for N environments at once, in float32
(gymnasium/envs/classic_control/pendulum.py)."""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY, Groups
from unirl.envs.sim.settings import read_numbers
from unirl.envs.sim.torch.env import TorchTask, World

DEFAULTS = {"gravity": 10.0}
"""m/s^2."""
TIME_STEP = 0.05
TORQUE_LIMIT, SPEED_LIMIT = 2.0, 8.0
RESET_SPANS = (math.pi, 1.0)


def pendulum(config: EnvConfig) -> TorchTask:
    """N rods of 1 m and 1 kg, hinged at one end, to be swung up and held by a torque.

    Observation: cosine and sine of the angle from upright, and its velocity. Action: a torque,
    clipped to [-2, 2] N m. Reward: -(angle^2 + 0.1 velocity^2 + 0.001 torque^2), of the state that
    the action was taken in. Episodes end by the time limit only.
    """
    chosen = read_numbers(config, DEFAULTS)
    return TorchTask(
        observation={POLICY: 3},
        action_space=spaces.Box(-TORQUE_LIMIT, TORQUE_LIMIT, (1,)),
        max_episode_length=200,
        step_dt=TIME_STEP,
        state_size=2,
        spans=RESET_SPANS,
        motion=lambda world: PendulumMotion(world, chosen["gravity"]),
    )


class PendulumMotion:
    """Semi-implicit Euler."""

    def __init__(self, world: World, gravity: float) -> None:
        self._world = world
        self._rows, self._after_rows = world.state.unbind(), world.after.unbind()
        self._torque, self._work = world.buffer(2).unbind()
        self._pull = 3 * gravity / 2 * TIME_STEP
        seen, final = world.buffer(3), world.buffer(3)
        self._seen, self._final = seen.unbind(), final.unbind()
        self.obs: Groups = {POLICY: seen.t()}
        self.final_obs: Groups = {POLICY: final.t()}

    def move(self, action: Tensor) -> None:
        (angle, speed), (new_angle, new_speed) = self._rows, self._after_rows
        torch.clamp(action[:, 0], -TORQUE_LIMIT, TORQUE_LIMIT, out=self._torque)
        torch.sin(angle, out=self._work).mul_(self._pull)
        torch.add(speed, self._work, out=new_speed).add_(self._torque, alpha=3 * TIME_STEP)
        new_speed.clamp_(-SPEED_LIMIT, SPEED_LIMIT)
        torch.add(angle, new_speed, alpha=TIME_STEP, out=new_angle)

    def score(self) -> Tensor | None:
        (angle, speed), torque, reward = self._rows, self._torque, self._world.reward
        torch.add(angle, math.pi, out=self._work).remainder_(2 * math.pi).sub_(math.pi)
        torch.mul(self._work, self._work, out=reward).neg_()
        reward.addcmul_(speed, speed, value=-0.1).addcmul_(torque, torque, value=-0.001)
        return None

    def observe(self) -> None:
        for (angle, speed), out in ((self._after_rows, self._final), (self._rows, self._seen)):
            torch.cos(angle, out=out[0])
            torch.sin(angle, out=out[1])
            out[2].copy_(speed)
