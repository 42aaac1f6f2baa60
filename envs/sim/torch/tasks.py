"""The tasks in pure torch, "torch/...": they run wherever torch runs, with nothing to install."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unirl.envs.config import EnvConfig
from unirl.envs.device import DeviceEnv
from unirl.envs.sim.torch.cartpole import Cartpole
from unirl.envs.sim.torch.gym_cartpole import GymCartpole
from unirl.envs.sim.torch.pendulum import Pendulum
from unirl.envs.sim.torch.point_mass import PointMass

Maker = Callable[[EnvConfig, int, torch.device], DeviceEnv]

TASKS: dict[str, Maker] = {
    "torch/Cartpole": Cartpole,
    "torch/CartPole-v1": GymCartpole,
    "torch/Pendulum": Pendulum,
    "torch/PointMass": PointMass,
}


def known_ids() -> list[str]:
    """The ids of this family, sorted."""
    return sorted(TASKS)


def make_sim(config: EnvConfig, num_envs: int, device: torch.device) -> DeviceEnv:
    """`num_envs` environments of one of `known_ids()`; UniRLError for settings it does not take."""
    return TASKS[config.id](config, num_envs, device)
