"""The tasks in pure torch, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unirl.envs.config import EnvConfig
from unirl.envs.sim.torch.cartpole import cartpole
from unirl.envs.sim.torch.env import TorchEnv, TorchTask
from unirl.envs.sim.torch.gym_cartpole import gym_cartpole
from unirl.envs.sim.torch.pendulum import pendulum
from unirl.envs.sim.torch.point_mass import point_mass

TASKS: dict[str, Callable[[EnvConfig], TorchTask]] = {
    "torch/Cartpole": cartpole,
    "torch/CartPole-v1": gym_cartpole,
    "torch/Pendulum": pendulum,
    "torch/PointMass": point_mass,
}


def known_ids() -> list[str]:
    return sorted(TASKS)


def make_sim(config: EnvConfig, num_envs: int, device: torch.device) -> TorchEnv:
    """`num_envs` environments of one of `known_ids()`; UniRLError for settings it does not take."""
    return TorchEnv(TASKS[config.id](config), config, num_envs, device)
