"""Stand-ins for isaaclab and isaaclab_tasks, which need a machine of their own: the step of
ManagerBasedRLEnv and DirectRLEnv, with tasks whose observations say which episode and step they
belong to.

What is kept of the original: episode_length_buf is counted first and compared afterwards; rows that
are over are reset before the observation is computed; reward and flags are buffers written to in
place; extras is one dictionary, in which "final_obs" stands from the first reset on, stale in steps
without one, and "log" is replaced at each reset; 2.x has no compute_final_obs and no
launch_simulation, and imports nothing before its app runs.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import gymnasium
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

LIMIT = 8
"""Steps of an episode of the manager-based task."""
NEVER = 1000
MODULES = (
    *("isaaclab", "isaaclab.app", "isaaclab_tasks", "isaaclab_tasks.utils"),
    *("isaaclab_tasks.utils.parse_cfg", "omni.kit.app"),
)


def fails_at(env: Any, episode: Any) -> Any:
    """The step at which an episode fails, for ints or tensors: 1 to LIMIT (together with the time
    limit), or NEVER."""
    number = 1 + (7 * env + 5 * episode + env * episode) % 12
    if isinstance(number, int):
        return number if number <= LIMIT else NEVER
    return torch.where(number <= LIMIT, number, NEVER)


class RLEnv(gymnasium.Env[Any, Any]):
    """What both workflows have in common."""

    def __init__(self, cfg: Any, **kwargs: Any) -> None:
        self.cfg = cfg
        self.num_envs, self.device = cfg.scene.num_envs, cfg.sim.device
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.reset_terminated = torch.zeros(self.num_envs, dtype=torch.bool)
        self.reset_time_outs = torch.zeros_like(self.reset_terminated)
        self.reward_buf = torch.zeros(self.num_envs)
        self.extras: dict[str, Any] = {}
        self.num_closed = 0
        self.poison: list[int] = []
        self.pays = False  # a reward that does not show a lost state
        self.row = torch.arange(self.num_envs)
        self.episode = torch.full((self.num_envs,), -1)
        self.steps = torch.zeros(self.num_envs)
        self.start = torch.zeros(self.num_envs)
        self.applied = torch.zeros(self.num_envs, 2)
        # One memory for all observations, as in the Warp-based environments.
        self.policy_buf = torch.zeros(self.num_envs, 3)
        self.single_action_space = spaces.Box(-math.inf, math.inf, (2,))
        self.action_space = spaces.Box(-math.inf, math.inf, (self.num_envs, 2))
        self._configure_spaces()

    def _configure_spaces(self) -> None:
        raise NotImplementedError

    @property
    def step_dt(self) -> float:
        return float(self.cfg.sim.dt * self.cfg.decimation)

    @property
    def max_episode_length(self) -> int:
        return math.ceil(self.cfg.episode_length_s / self.step_dt)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            torch.manual_seed(seed)
        self._reset_idx(torch.arange(self.num_envs))
        return self._observe(), self.extras

    def step(self, action: torch.Tensor) -> Any:
        self.applied[:] = action
        self.steps += 1
        self.steps[self.poison] = float("nan")
        self.episode_length_buf += 1
        self._get_dones()
        over = self.reset_terminated | self.reset_time_outs
        self.reward_buf[:] = 1.0 if self.pays else 100 * self.episode + self.steps
        rows = over.nonzero(as_tuple=False).squeeze(-1)
        if len(rows) > 0:
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = clone(self._observe())
            self._reset_idx(rows)
        obs = self._observe()
        return obs, self.reward_buf, self.reset_terminated, self.reset_time_outs, self.extras

    def _get_dones(self) -> None:
        failed = self.steps == fails_at(self.row, self.episode)
        self.reset_terminated[:] = failed
        self.reset_time_outs[:] = self.episode_length_buf >= self.max_episode_length

    def _reset_idx(self, rows: torch.Tensor) -> None:
        self.episode[rows] += 1
        self.steps[rows] = 0
        self.start[rows] = torch.rand(len(rows))
        self.episode_length_buf[rows] = 0
        self.extras["log"] = {
            "Episode_Reward/alive": self.reward_buf[rows].mean(),
            "Episode_Termination/time_out": float(self.reset_time_outs.sum()),
            "count": len(rows),
        }

    def _observe(self) -> dict[str, Any]:
        self.policy_buf[:, 0] = self.episode
        self.policy_buf[:, 1] = self.steps
        self.policy_buf[:, 2] = self.start
        return {"policy": self.policy_buf}

    def close(self) -> None:
        self.num_closed += 1


class ManagerBased(RLEnv):
    """Groups "policy", "critic" (terms that are not concatenated) and a camera nobody asked for."""

    def _configure_spaces(self) -> None:
        def box(*shape: int) -> spaces.Box:
            return spaces.Box(-math.inf, math.inf, shape)

        self.single_observation_space = spaces.Dict()
        self.single_observation_space["policy"] = box(3)
        self.single_observation_space["critic"] = spaces.Dict({"id": box(1), "place": box(2)})
        self.single_observation_space["camera"] = box(4, 4, 3)

    def _observe(self) -> dict[str, Any]:
        obs = super()._observe()
        place = self.policy_buf[:, :2].clone()
        obs["critic"] = {"place": place, "id": self.row.unsqueeze(1).float()}
        obs["camera"] = torch.zeros(self.num_envs, 4, 4, 3)
        return obs


class Direct(RLEnv):
    """One group, and time-outs one step earlier, as the direct tasks count them."""

    def _configure_spaces(self) -> None:
        self.single_observation_space = spaces.Dict()
        self.single_observation_space["policy"] = spaces.Box(-math.inf, math.inf, (3,))

    def _get_dones(self) -> None:
        super()._get_dones()
        self.reset_time_outs[:] = self.episode_length_buf >= self.max_episode_length - 1


class Several(Direct):
    """A task with several agents."""

    possible_agents = ("left", "right")


TASKS: dict[str, Any] = {
    "Isaac-Fake": ManagerBased,
    "Isaac-Fake-Direct": Direct,
    "Isaac-Fake-Several": Several,
}


def clone(obs: Any) -> Any:
    """A copy of nested observations."""
    return {k: clone(v) for k, v in obs.items()} if isinstance(obs, dict) else obs.clone()


def task_cfg(version: int) -> Any:
    """The configuration that a registration points to."""
    cfg = SimpleNamespace(
        seed=None,
        decimation=4,
        episode_length_s=LIMIT * 4 * 0.005,
        is_finite_horizon=False,
        sim=SimpleNamespace(dt=0.005, device="cuda:0"),
        scene=SimpleNamespace(num_envs=4096),
    )
    if version >= 3:
        cfg.compute_final_obs = False
        cfg.autoreset_mode = AutoresetMode.DISABLED
    return cfg


class Started(list[Any]):
    """How the simulation app was started, in order."""


def install(patch: pytest.MonkeyPatch, version: Literal[2, 3] = 3) -> Started:
    """Both packages; isaaclab_tasks registers its tasks with Gymnasium. Returns what is started."""
    started = Started()
    for name in MODULES[:-1]:
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.delitem(sys.modules, "omni.kit.app", raising=False)
    app = sys.modules["isaaclab.app"]
    parse: Any
    if version == 2:
        patch.setattr(app, "AppLauncher", lambda **kw: start_app(patch, started, kw), raising=False)

        def parse(name: str, device: str = "cuda:0", num_envs: int | None = None) -> Any:
            assert started, "Isaac Lab 2 imports nothing before its app runs"
            return parse_env_cfg(name, device, num_envs)
    else:
        patch.setattr(app, "launch_simulation", launcher(started), raising=False)

        def parse(
            name: str,
            device: str = "cuda:0",
            num_envs: int | None = None,
            overrides: Any = (),
        ) -> Any:
            cfg = parse_env_cfg(name, device, num_envs)
            cfg.overrides = list(overrides)
            return cfg

    patch.setattr(
        sys.modules["isaaclab_tasks.utils.parse_cfg"], "parse_env_cfg", parse, raising=False
    )
    for task, entry_point in TASKS.items():
        patch.delitem(gymnasium.registry, task, raising=False)
        spec = gymnasium.envs.registration.EnvSpec(
            id=task,
            entry_point=entry_point,
            disable_env_checker=True,
            kwargs={"env_cfg_entry_point": lambda: task_cfg(version)},
        )
        patch.setitem(gymnasium.registry, task, spec)
    return started


def parse_env_cfg(name: str, device: str, num_envs: int | None) -> Any:
    """parse_cfg.parse_env_cfg: the registered configuration, with what the caller sets."""
    cfg = gymnasium.registry[name].kwargs["env_cfg_entry_point"]()
    cfg.sim.device = device
    cfg.scene.num_envs = num_envs or cfg.scene.num_envs
    return cfg


def start_app(patch: pytest.MonkeyPatch, started: Started, kwargs: dict[str, Any]) -> None:
    """AppLauncher of 2.x: once per process."""
    assert not started, "the app starts once"
    patch.setitem(sys.modules, "omni.kit.app", ModuleType("omni.kit.app"))
    started.append(kwargs)


def launcher(started: Started) -> Any:
    """launch_simulation of 3.0."""

    @contextlib.contextmanager
    def launch_simulation(cfg: Any, launcher_args: dict[str, Any]) -> Iterator[None]:
        started.append((cfg, launcher_args))
        yield

    return launch_simulation


def remove(patch: pytest.MonkeyPatch) -> None:
    """Neither package is there."""
    for name in MODULES:
        patch.delitem(sys.modules, name, raising=False)
