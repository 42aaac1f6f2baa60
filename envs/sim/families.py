"""The families of simulators: which module an id's family lives in, and all ids there are."""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = {
    "torch/": "torch.tasks",
    "warp/": "warp.tasks",
    "isaacgym/": "adapters.isaacgym",
    "isaaclab/": "adapters.isaaclab",
    "gymnasium/": "adapters.gymnasium",
}
"""Where each of SIM_FAMILIES (envs/config.py) lives: a module of this package with
`known_ids() -> list[str]`, which works without the simulator's package, and
`make_sim(config, num_envs, device) -> DeviceEnv`."""


def module_of(family: str) -> ModuleType:
    """The module of one family, imported at its first use: some take seconds, and not every run
    needs a simulator."""
    return importlib.import_module(f"unirl.envs.sim.{MODULES[family]}")


def known_ids() -> list[str]:
    """All ids of simulators that can be named in advance, sorted, whether or not their package is
    installed."""
    return sorted(env_id for family in MODULES for env_id in module_of(family).known_ids())
