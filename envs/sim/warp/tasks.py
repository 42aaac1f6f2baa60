"""The tasks on MuJoCo Warp, by name: which exist, and how one is made."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from unirl.envs.catalog import unknown_id
from unirl.envs.config import EnvConfig
from unirl.envs.device import DeviceEnv
from unirl.envs.sim.settings import read_settings
from unirl.errors import UniRLError

if TYPE_CHECKING:
    from unirl.envs.sim.warp.worlds import WarpTask

FACTORIES = {
    "warp/Cartpole": ("cartpole", "cartpole"),
    "warp/Ant-isaac": ("ant", "ant_isaac"),
    "warp/Humanoid-isaac": ("humanoid", "humanoid_isaac"),
    "warp/Ant-v5": ("ant", "ant_v5"),
    "warp/HalfCheetah-v5": ("half_cheetah", "half_cheetah_v5"),
}
"""Module and function of each task; imported when asked for, since they need warp."""
SETTINGS = {"njmax": "constraints per world", "nconmax": "contacts per world, on average"}
"""What env.kwargs may hold, besides `record`."""


def known_ids() -> list[str]:
    """All of them, whether MuJoCo Warp is installed or not."""
    return list(FACTORIES)


def make_sim(config: EnvConfig, num_envs: int, device: torch.device) -> DeviceEnv:
    """The task's environments on `device`, ready for reset.

    env.kwargs: njmax and nconmax (room for constraints and contacts per world), record (False
    launches kernel after kernel instead of one recorded graph). The first time on a machine Warp
    compiles for half a minute or more; it keeps the result in WARP_CACHE_PATH.
    """
    if config.id not in FACTORIES:
        raise unknown_id(config.id, known_ids())
    settings = _settings(config)
    record = settings.pop("record", True)
    module_name, function = FACTORIES[config.id]
    _import_warp(config.id)
    module = importlib.import_module(f"unirl.envs.sim.warp.{module_name}")
    task: WarpTask = replace(getattr(module, function)(), **settings)
    if config.max_episode_steps is not None:
        task = replace(task, max_episode_length=config.max_episode_steps)
    from unirl.envs.sim.warp.env import WarpEnv

    return WarpEnv(task, num_envs, device, record=record)


def _settings(config: EnvConfig) -> dict[str, Any]:
    read_settings(config, {**SETTINGS, "record": ""}, "correct env.kwargs")
    for name, value in config.kwargs.items():
        if name == "record":
            if not isinstance(value, bool):
                raise UniRLError(
                    f"record is {value!r}", "it must be true or false", "correct env.kwargs"
                )
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UniRLError(
                f"{name} ({SETTINGS[name]}) is {value!r}",
                "it must be a whole number, 1 or more",
                "leave it out of env.kwargs for the measured default",
            )
    return dict(config.kwargs)


def _import_mujoco() -> None:
    """MuJoCo loads a drawing library at once, and fails in whatever way that fails."""
    try:
        importlib.import_module("mujoco")
    except ImportError:
        raise
    except Exception as error:
        raise UniRLError(
            f"MuJoCo could not be loaded: {error}",
            f"MUJOCO_GL is {os.environ.get('MUJOCO_GL')!r}, whose drawing library must be there",
            "unset MUJOCO_GL, or set it to egl",
        ) from error


def _import_warp(env_id: str) -> None:
    """Imports the packages, quietly: Warp announces itself and each kernel it loads."""
    try:
        warp = importlib.import_module("warp")
        if warp.config.log_level == warp.LOG_INFO:
            warp.config.log_level = warp.LOG_WARNING
        _import_mujoco()
        importlib.import_module("mujoco_warp")
    except ImportError as error:
        raise UniRLError(
            f'env "{env_id}" needs MuJoCo Warp',
            f"it could not be imported: {error}",
            "pip install 'unirl[warp]'",
        ) from error
