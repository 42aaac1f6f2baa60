"""From an EnvConfig to a simulator on a device: finds the family that an id belongs to, and turns
what may fail into readable errors."""

from __future__ import annotations

import torch

from unirl.device import usable_device, with_index
from unirl.envs import catalog
from unirl.envs.config import SIM_FAMILIES, EnvConfig
from unirl.envs.device import DeviceEnv
from unirl.envs.sim import families
from unirl.errors import UniRLError


def make_device_env(config: EnvConfig, num_envs: int, device: torch.device) -> DeviceEnv:
    """`num_envs` environments on `device`, not yet reset.

    Raises UniRLError for an unknown task, num_envs < 1, a device that is not there, a package that
    is not installed, and settings that the task does not take.
    """
    config.check_num_envs(num_envs)
    family = _family_of(config)
    device = with_index(usable_device("sim.device", str(device)))
    catalog.import_registering_module(config)
    module = families.module_of(family)
    known = module.known_ids()
    # A family that is open, such as every id of a registry elsewhere, lists no ids.
    if known and config.id not in known:
        raise catalog.unknown_id(config.id, catalog.known_env_ids())
    try:
        env: DeviceEnv = module.make_sim(config, num_envs, device)
    except ImportError as error:
        raise catalog.missing_package(config, error) from error
    return env


def _family_of(config: EnvConfig) -> str:
    for family in SIM_FAMILIES:
        if config.id.startswith(family):
            return family
    raise UniRLError(
        f'env "{config.id}" is not a simulator on a device',
        f"its id must begin with one of {', '.join(SIM_FAMILIES)}",
        'try "torch/Cartpole"',
    )
