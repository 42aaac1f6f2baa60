"""Isaac Lab's tasks, "isaaclab/<id>", as simulators on a device. Source: Isaac Lab 3.0
(ManagerBasedRLEnv and DirectRLEnv); 2.x works too, without final observations.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from unirl.device import with_index
from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.device import Groups, SimSpec, SimStep
from unirl.envs.sim.adapters.tensors import (
    ObsReader,
    action_writer,
    check_placement,
    final_rows,
    finite_rows,
    keep_rows,
    random_steps,
    scalars,
)
from unirl.envs.sim.settings import read_settings
from unirl.errors import UniRLError

FAMILY = "isaaclab/"
SETTINGS: Mapping[str, Any] = {"headless": True, "overrides": []}
"""What env.kwargs may hold, with defaults. overrides: changes to the configuration as Isaac Lab
3.0 writes them, such as ["physics=newton_mjwarp"]."""


def known_ids() -> list[str]:
    """The ids that Isaac Lab has registered, where it is loaded; else empty, since only the package
    knows them."""
    if "isaaclab_tasks" not in sys.modules:
        return []
    return sorted(
        FAMILY + spec.id
        for spec in gymnasium.registry.values()
        if "env_cfg_entry_point" in spec.kwargs
    )


def make_sim(config: EnvConfig, num_envs: int, device: torch.device) -> IsaacLabSim:
    """`num_envs` environments of a registered task; starts the simulation app if needed."""
    settings = read_settings(config, SETTINGS, "write it as one of the overrides")
    device = with_index(device)
    app, parse = _import(config, device, settings)
    catalog.import_registering_module(config)
    if config.id not in known_ids():
        raise catalog.unknown_id(config.id, known_ids())
    name = config.id.removeprefix(FAMILY)
    cfg = _configure(config, _parse(config, parse, name, num_envs, device, settings))
    gives_final_obs = hasattr(cfg, "compute_final_obs")
    if hasattr(app, "launch_simulation"):
        # The runtime belongs to the process: leaving it may end the process, so that comes last.
        runtime = contextlib.ExitStack()
        arguments = {"headless": settings["headless"], "device": str(device)}
        runtime.enter_context(app.launch_simulation(cfg, arguments))
        atexit.register(runtime.close)
    env: Any = gymnasium.make(name, cfg=cfg)
    try:
        return IsaacLabSim(config, env, num_envs, device, gives_final_obs)
    except BaseException:
        env.close()
        raise


class IsaacLabSim:
    """A ManagerBasedRLEnv or DirectRLEnv; see DeviceEnv.

    Where the task's configuration says is_finite_horizon, the time limit is part of the task, and
    reaching it terminates. A row whose state is not finite gets the task's time limit as its step
    count, so that the task resets it in the next step; that step is no transition either. (Its own
    reset takes row numbers, which would have to come from the device.)

    `reset` seeds the generators of Python, NumPy and torch, as Isaac Lab does.
    """

    def __init__(
        self,
        config: EnvConfig,
        env: Any,
        num_envs: int,
        device: torch.device,
        gives_final_obs: bool,
    ) -> None:
        self.env, self._lab = env, env.unwrapped
        if getattr(self._lab, "possible_agents", None):
            raise UniRLError(
                f'env "{config.id}" has several agents',
                f"one agent is needed on a device, found {list(self._lab.possible_agents)}",
                "choose another task",
            )
        check_placement(config.id, num_envs, device, self._lab, "leave scene.num_envs to UniRL")
        self._read = ObsReader(self._lab.single_observation_space, num_envs, config.id)
        self._write = action_writer(self._lab.single_action_space, device, config.id)
        self._finite_horizon = bool(getattr(self._lab.cfg, "is_finite_horizon", False))
        self._due = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._nan_states = torch.zeros((), dtype=torch.int64, device=device)
        self._logged: object = None
        self._closed = False
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation=self._read.sizes,
            action_space=self._lab.single_action_space,
            max_episode_length=int(self._lab.max_episode_length),
            device=device,
            step_dt=float(self._lab.step_dt),
            physics_steps=int(self._lab.cfg.decimation),
            autoreset="same_step",
            gives_final_obs=gives_final_obs,
            single=True,
            truncates_early=True,
        )

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        raw, _ = self.env.reset(seed=seed)
        self._read.check(raw, self.spec.device)
        obs = self._read(raw)
        sound = finite_rows(*obs.values())
        if random_phases:
            self._lab.episode_length_buf.copy_(random_steps(seed, self.spec.num_envs, self.spec))
        self._ask_reset(~sound)
        self._nan_states.add_(self._due.sum())
        return keep_rows(sound, obs)

    def step(self, action: Tensor) -> SimStep:
        raw, reward, terminated, truncated, extras = self.env.step(self._write(action))
        obs = self._read(raw)
        over = terminated | truncated
        sound_now = finite_rows(*obs.values())
        sound = sound_now & finite_rows(reward)
        final: Groups | None = None
        if self.spec.gives_final_obs:
            # Written only in steps that reset a row, and stale until the next of them.
            raw_final = extras.get("final_obs")
            final = final_rows(over, obs, None if raw_final is None else self._read(raw_final))
            sound_final = finite_rows(*final.values())
            sound &= sound_final
            final = keep_rows(sound_final, final)
        valid = sound & ~self._due
        terminal = over if self._finite_horizon else terminated
        lost = ~sound & ~self._due  # in the step after, only what is lost again counts
        self._nan_states.add_((lost | ~sound_now).sum())
        # A row that is over was reset by the task already.
        self._ask_reset(~sound_now | (lost & ~over))
        return SimStep(
            obs=keep_rows(sound_now, obs),
            reward=torch.where(valid, reward.float(), 0.0),
            terminated=terminal & valid,
            truncated=truncated & ~terminal & valid,
            final_obs=final,
            valid=valid,
            extras=self._log(extras),
        )

    def counters(self) -> Mapping[str, Tensor]:
        return {"nan_states": self._nan_states}

    def close(self) -> None:
        """Close the environment; the simulation app runs until the process ends."""
        if not self._closed:
            self._closed = True
            self.env.close()

    def _ask_reset(self, rows: Tensor) -> None:
        """Have the task reset `rows` in the next step, which will be no transition for them."""
        self._due = rows
        self._lab.episode_length_buf.masked_fill_(rows, self.spec.max_episode_length)

    def _log(self, extras: Mapping[str, Any]) -> dict[str, Tensor]:
        """extras["log"], once: Isaac Lab replaces it when episodes end, and shows it until then."""
        entries = extras.get("log")
        if entries is None or entries is self._logged:
            return {}
        self._logged = entries
        device = self.spec.device
        return scalars(
            {
                name: torch.full((), value, device=device) if isinstance(value, float) else value
                for name, value in entries.items()
            }
        )


def _import(
    config: EnvConfig, device: torch.device, settings: Mapping[str, Any]
) -> tuple[ModuleType, Any]:
    """The module isaaclab.app and parse_env_cfg; in 2.x, with the simulation app running."""
    try:
        app = importlib.import_module("isaaclab.app")
        # Before 3.0 nothing of Isaac Lab can be imported until the app runs, and it starts once.
        if not hasattr(app, "launch_simulation") and "omni.kit.app" not in sys.modules:
            app.AppLauncher(headless=settings["headless"], device=str(device))
        importlib.import_module("isaaclab_tasks")  # registers the tasks
        return app, importlib.import_module("isaaclab_tasks.utils.parse_cfg").parse_env_cfg
    except ModuleNotFoundError as error:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        found = error.name or str(error)
        raise UniRLError(
            f'env "{config.id}" needs Isaac Lab, which is not installed here in full',
            f'module "{found}" was not found; Isaac Lab 3.0 wants Python 3.12 and torch 2.11,'
            f" this is Python {python} with torch {torch.__version__}",
            "install isaaclab and isaaclab_tasks into this environment as the installation guide of"
            " isaac-sim/IsaacLab says, without Isaac Sim for tasks on Newton",
        ) from error


def _parse(
    config: EnvConfig,
    parse: Any,
    name: str,
    num_envs: int,
    device: torch.device,
    settings: Mapping[str, Any],
) -> Any:
    """The task's configuration object, for `num_envs` environments on `device`."""
    overrides = {"overrides": list(settings["overrides"])} if settings["overrides"] else {}
    try:
        return parse(name, device=str(device), num_envs=num_envs, **overrides)
    except TypeError as error:
        if "overrides" not in str(error):
            raise
        raise UniRLError(
            f'env "{config.id}" does not take the setting "overrides"',
            f"it needs Isaac Lab 3.0 ({error})",
            "leave it out, or install a newer Isaac Lab",
        ) from error


def _configure(config: EnvConfig, cfg: Any) -> Any:
    """Settle what UniRL relies on: final observations, same-step resets, the time limit."""
    if hasattr(cfg, "compute_final_obs"):
        cfg.compute_final_obs = True
    if hasattr(cfg, "autoreset_mode"):
        cfg.autoreset_mode = AutoresetMode.SAME_STEP
    if getattr(cfg, "seed", 0) is None:
        cfg.seed = 0  # of the scene, which is built once; reset(seed) seeds the episodes
    if config.max_episode_steps is not None:
        # Isaac Lab rounds seconds / step_dt up: half a step less is safe from rounding errors.
        step_dt = cfg.sim.dt * cfg.decimation
        cfg.episode_length_s = (config.max_episode_steps - 0.5) * step_dt
    return cfg
