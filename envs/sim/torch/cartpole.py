"""The cart and pole of IsaacGymEnvs in closed form: its masses, effort, rules and rates, without a
physics engine (github.com/isaac-sim/IsaacGymEnvs, tasks/cartpole.py and assets/urdf/cartpole.urdf).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY, Groups
from unirl.envs.sim.settings import read_numbers
from unirl.envs.sim.torch.env import TorchTask, World

DEFAULTS = {"effort": 400.0, "reset_distance": 3.0}
"""Force at action 1 in newtons; metres from the middle at which an episode terminates."""
STEP_DT, SUBSTEPS = 1 / 60, 2
GRAVITY = 9.81
CART_MASS = POLE_MASS = 1.0
POLE_CENTRE = 0.47
"""Metres from the joint to the pole's centre of mass."""
POLE_INERTIA = POLE_MASS * (1.0**2 + 0.06**2) / 12
"""About its centre, of the box that is the pole's shape: the original names none."""
POLE_SPEED_LIMIT = 8.0
"""rad/s, from the joint. The cart's limit of 100 m/s is out of reach within 3 m."""
RESET_SPANS = (0.1, 0.25, 0.1, 0.25)
_SUBSTEP_DT = STEP_DT / SUBSTEPS
_MOMENT = POLE_MASS * POLE_CENTRE
_COUPLING = _MOMENT / (CART_MASS + POLE_MASS)
_INERTIA = (POLE_INERTIA + POLE_MASS * POLE_CENTRE**2) / _MOMENT


def cartpole(config: EnvConfig) -> TorchTask:
    """N carts on rails, each with a pole to be held upright by forces on the cart.

    Observation: cart position (m) and velocity, pole angle (rad) and velocity. Action: one number,
    clipped to [-1, 1], times 400 N. Reward: 1 - angle^2 - 0.01 |velocity| - 0.005 |pole velocity|,
    and -2 at the end when the cart leaves 3 m or the pole has fallen. A step is 1/60 s, in two
    substeps of semi-implicit Euler.
    """
    chosen = read_numbers(config, DEFAULTS)
    return TorchTask(
        observation={POLICY: 4},
        action_space=spaces.Box(-1.0, 1.0, (1,)),
        max_episode_length=500,
        step_dt=STEP_DT,
        physics_steps=SUBSTEPS,
        state_size=4,
        spans=RESET_SPANS,
        motion=lambda world: CartpoleMotion(world, chosen["effort"], chosen["reset_distance"]),
        failure_reward=-2.0,
    )


class CartpoleMotion:
    """The state itself is what the policy sees."""

    def __init__(self, world: World, effort: float, reset_distance: float) -> None:
        self._world = world
        self._before, self._after = _views(world.state), _views(world.after)
        self._size_rows = world.size.unbind()
        self._acceleration = world.buffer(2)
        self._scratch = (*world.buffer(6).unbind(), *self._acceleration.unbind())
        self._ones = torch.ones_like(world.reward)
        self._inertia = torch.full_like(world.reward, _INERTIA)
        self._over = world.buffer(2, torch.bool)
        self._over_rows = self._over.unbind()
        self._limits = torch.tensor(((reset_distance,), (math.pi / 2,)), device=world.device)
        self._thrust = effort / (CART_MASS + POLE_MASS)
        self.obs: Groups = {POLICY: world.state.t()}
        self.final_obs: Groups = {POLICY: world.after.t()}

    def move(self, action: Tensor) -> None:
        torch.clamp(action[:, 0], -1.0, 1.0, out=self._scratch[0]).mul_(self._thrust)
        self._substep(self._before, self._after)
        for _ in range(SUBSTEPS - 1):
            self._substep(self._after, self._after)

    def score(self) -> Tensor | None:
        _, x_dot, angle, angle_dot = self._size_rows
        reward = self._world.reward
        torch.addcmul(self._ones, angle, angle, value=-1.0, out=reward)
        reward.add_(x_dot, alpha=-0.01).add_(angle_dot, alpha=-0.005)
        torch.gt(self._world.size[0::2], self._limits, out=self._over)
        return self._over_rows[0].logical_or_(self._over_rows[1])

    def observe(self) -> None:
        """Nothing to fill."""

    def _substep(self, before: _Views, after: _Views) -> None:
        """Lagrange's equations with q = (x, angle), solved for the accelerations.

        With the total mass M, the first moment P = m l, the inertia J about the joint and f = F/M,
        where a positive angle tilts the pole towards negative x:
            u = f - P/M sin w^2,   angle'' = (g sin + cos u) / (J/P - P/M cos^2),
            x'' = u + P/M cos angle''.
        """
        force, sin, cos, thrust, torque, inertia, x_acceleration, angle_acceleration = self._scratch
        torch.sin(before.angle, out=sin)
        torch.cos(before.angle, out=cos)
        torch.mul(before.angle_dot, before.angle_dot, out=thrust)
        torch.addcmul(force, sin, thrust, value=-_COUPLING, out=thrust)
        torch.mul(cos, thrust, out=torque).add_(sin, alpha=GRAVITY)
        torch.addcmul(self._inertia, cos, cos, value=-_COUPLING, out=inertia)
        torch.div(torque, inertia, out=angle_acceleration)
        torch.addcmul(thrust, cos, angle_acceleration, value=_COUPLING, out=x_acceleration)
        torch.add(before.velocity, self._acceleration, alpha=_SUBSTEP_DT, out=after.velocity)
        after.angle_dot.clamp_(-POLE_SPEED_LIMIT, POLE_SPEED_LIMIT)
        torch.add(before.position, after.velocity, alpha=_SUBSTEP_DT, out=after.position)


class _Views(NamedTuple):
    """Views of a state [4, N], made once: making them costs as much as a kernel."""

    position: Tensor
    velocity: Tensor
    angle: Tensor
    angle_dot: Tensor


def _views(state: Tensor) -> _Views:
    return _Views(state[0::2], state[1::2], state[2], state[3])
