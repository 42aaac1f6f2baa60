"""The cart and pole of IsaacGymEnvs in closed form: its masses, effort, rules and rates, without a
physics engine (github.com/isaac-sim/IsaacGymEnvs, tasks/cartpole.py and assets/urdf/cartpole.urdf).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY, Groups, SimSpec, SimStep
from unirl.envs.sim import episodes
from unirl.envs.sim.settings import read_settings

DEFAULTS = {"effort": 400.0, "reset_distance": 3.0}
"""Force at action 1 in newtons; metres from the middle at which an episode terminates."""
LENGTH = 500
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


class Cartpole:
    """N carts on rails, each with a pole to be held upright by forces on the cart.

    Observation: cart position (m) and velocity, pole angle (rad) and velocity. Action: one number,
    clipped to [-1, 1], times 400 N. Reward: 1 - angle^2 - 0.01 |velocity| - 0.005 |pole velocity|,
    and -2 at the end when the cart leaves 3 m or the pole lies. A step is 1/60 s, in two substeps
    of semi-implicit Euler.

    State is kept as [4, N]: a kernel then works on whole rows of memory, and observations are
    transposed views of it.
    """

    def __init__(self, config: EnvConfig, num_envs: int, device: torch.device) -> None:
        chosen = read_settings(config, DEFAULTS)
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation={POLICY: 4},
            action_space=spaces.Box(-1.0, 1.0, (1,)),
            max_episode_length=config.max_episode_steps or LENGTH,
            device=device,
            step_dt=STEP_DT,
            physics_steps=SUBSTEPS,
            follows_stream=True,
            capturable=True,
        )

        def buffer(rows: int) -> Tensor:
            return torch.zeros((rows, num_envs), device=device)

        self.episodes = episodes.new_episodes(num_envs, self.spec.max_episode_length, 4, device)
        self.state, self._final, self._noise, self._size = (buffer(4) for _ in range(4))
        self._before, self._after = _rows(self.state), _rows(self._final)
        self._size_rows, self._size_sum = self._size.unbind(), buffer(1)[0]
        self._acceleration = buffer(2)
        self._scratch = (*buffer(6).unbind(), *self._acceleration.unbind())
        self._ones, self._reward = torch.ones(num_envs, device=device), buffer(1)[0]
        self._inertia = torch.full((num_envs,), _INERTIA, device=device)
        self._over = self._acceleration.bool()
        self._over_rows = self._over.unbind()
        self._reset_scale = episodes.noise_scale(RESET_SPANS, self.state)
        self._limits = torch.tensor(((chosen["reset_distance"],), (math.pi / 2,)), device=device)
        self._push = chosen["effort"] / (CART_MASS + POLE_MASS)
        self._obs: Groups = {POLICY: self.state.t()}
        self._final_obs: Groups = {POLICY: self._final.t()}

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """New episodes everywhere; see DeviceEnv."""
        episodes.begin(self.episodes, seed, random_phases)
        episodes.draw_noise(self.episodes, self._reset_scale, self.state)
        return self._obs

    def step(self, action: Tensor) -> SimStep:
        """One step; see DeviceEnv."""
        book, reward = self.episodes, self._reward
        torch.clamp(action[:, 0], -1.0, 1.0, out=self._scratch[0]).mul_(self._push)
        self._substep(self._before, self._after)
        for _ in range(SUBSTEPS - 1):
            self._substep(self._after, self._after)

        torch.abs(self._final, out=self._size)
        _, x_dot, angle, angle_dot = self._size_rows
        torch.addcmul(self._ones, angle, angle, value=-1.0, out=reward)
        reward.add_(x_dot, alpha=-0.01).add_(angle_dot, alpha=-0.005)
        torch.gt(self._size[0::2], self._limits, out=self._over)
        failed = self._over_rows[0].logical_or_(self._over_rows[1])
        episodes.end_step(book, failed, torch.sum(self._size, 0, out=self._size_sum))
        reward.masked_fill_(book.terminated, -2.0).masked_fill_(book.invalid, 0.0)

        self._final.nan_to_num_(0.0, 0.0, 0.0)
        episodes.draw_noise(book, self._reset_scale, self._noise)
        torch.where(book.done, self._noise, self._final, out=self.state)
        return episodes.step_result(book, self._obs, reward, self._final_obs)

    def counters(self) -> Mapping[str, Tensor]:
        """See DeviceEnv."""
        return episodes.counters(self.episodes)

    def generators(self) -> Sequence[torch.Generator]:
        """See DeviceEnv."""
        return (self.episodes.generator,)

    def close(self) -> None:
        """Nothing is held; see DeviceEnv."""

    def _substep(self, before: _Rows, after: _Rows) -> None:
        """Lagrange's equations with q = (x, angle), solved for the accelerations.

        With the total mass M, the first moment P = m l, the inertia J about the joint and f = F/M,
        where a positive angle tilts the pole towards negative x:
            u = f - P/M sin w^2,   angle'' = (g sin + cos u) / (J/P - P/M cos^2),
            x'' = u + P/M cos angle''.
        """
        force, sin, cos, push, torque, inertia, x_acceleration, angle_acceleration = self._scratch
        torch.sin(before.angle, out=sin)
        torch.cos(before.angle, out=cos)
        torch.mul(before.angle_dot, before.angle_dot, out=push)
        torch.addcmul(force, sin, push, value=-_COUPLING, out=push)
        torch.mul(cos, push, out=torque).add_(sin, alpha=GRAVITY)
        torch.addcmul(self._inertia, cos, cos, value=-_COUPLING, out=inertia)
        torch.div(torque, inertia, out=angle_acceleration)
        torch.addcmul(push, cos, angle_acceleration, value=_COUPLING, out=x_acceleration)
        torch.add(before.velocity, self._acceleration, alpha=_SUBSTEP_DT, out=after.velocity)
        after.angle_dot.clamp_(-POLE_SPEED_LIMIT, POLE_SPEED_LIMIT)
        torch.add(before.position, after.velocity, alpha=_SUBSTEP_DT, out=after.position)


class _Rows(NamedTuple):
    """Views of a state [4, N], made once: making them costs as much as a kernel."""

    position: Tensor
    velocity: Tensor
    angle: Tensor
    angle_dot: Tensor


def _rows(state: Tensor) -> _Rows:
    return _Rows(state[0::2], state[1::2], state[2], state[3])


_SUBSTEP_DT = STEP_DT / SUBSTEPS
_MOMENT = POLE_MASS * POLE_CENTRE
_COUPLING = _MOMENT / (CART_MASS + POLE_MASS)
_INERTIA = (POLE_INERTIA + POLE_MASS * POLE_CENTRE**2) / _MOMENT
