"""Stand-ins for isaacgym and isaacgymenvs, which cannot be installed beside this Python: VecTask's
control flow and buffers, with tasks whose observations say which episode and step they belong to.

What is kept of the original: reset_buf is int64 and all ones at first; reset() only shows what
stands in the buffers; time_outs are computed after the task's own step from progress_buf and
reset_buf; observations and states are clipped into new tensors, while reward and reset_buf are
handed out as they are and written to again; obs_dict and extras are the same objects throughout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

LIMIT = 9
"""Tasks end an episode when progress_buf reaches LIMIT - 1."""
CLIP_OBS = 1000.0
NEVER = 1000
MODULES = (
    *("isaacgym", "isaacgym.gymapi", "isaacgym.gymdeps", "isaacgymenvs", "isaacgymenvs.tasks"),
    *("isaacgymenvs.tasks.base", "isaacgymenvs.tasks.base.vec_task"),
)


def fails_at(env: Any, episode: Any) -> Any:
    """The step at which an episode fails, for ints or tensors: 0 (at once) to 8 (together with the
    time limit), or NEVER."""
    number = (7 * env + 5 * episode + env * episode) % 13
    if isinstance(number, int):
        return number if number < LIMIT else NEVER
    return torch.where(number < LIMIT, number, NEVER)


class VecTask:
    """The base class, reduced to what concerns an agent."""

    num_states = 0

    def __init__(self, cfg: dict[str, Any], rl_device: str, sim_device: str) -> None:
        self.cfg, self.rl_device = cfg, rl_device
        self.device = sim_device if cfg["sim"]["use_gpu_pipeline"] else "cpu"
        self.num_envs = cfg["env"]["numEnvs"]
        self.num_obs, self.num_actions = 4, 2
        self.clip_obs = CLIP_OBS
        self.clip_actions = cfg["env"].get("clipActions", float("inf"))
        self.control_freq_inv = 2
        self.sim_params = SimpleNamespace(dt=1 / 60, substeps=2)
        self.dt = self.sim_params.dt
        self.max_episode_length = LIMIT
        self.allocate_buffers()
        self.obs_dict: dict[str, torch.Tensor] = {}
        self.reset_calls = 0
        self.poison: list[int] = []
        # The toy's state; `steps` is what physics computes, and what may stop being a number.
        self.row = torch.arange(self.num_envs)
        self.episode = torch.full((self.num_envs,), -1)
        self.steps = torch.zeros(self.num_envs)
        self.start = torch.zeros(self.num_envs)
        self.applied = torch.zeros(self.num_envs, self.num_actions)

    def allocate_buffers(self) -> None:
        self.obs_buf = torch.zeros(self.num_envs, self.num_obs)
        self.states_buf = torch.zeros(self.num_envs, self.num_states)
        self.rew_buf = torch.zeros(self.num_envs)
        self.reset_buf = torch.ones(self.num_envs, dtype=torch.long)
        self.timeout_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.progress_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.extras: dict[str, Any] = {}

    def get_state(self) -> torch.Tensor:
        return torch.clamp(self.states_buf, -self.clip_obs, self.clip_obs).to(self.rl_device)

    def zero_actions(self) -> torch.Tensor:
        return torch.zeros(self.num_envs, self.num_actions, device=self.rl_device)

    def reset(self) -> dict[str, torch.Tensor]:
        self.reset_calls += 1
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -self.clip_obs, self.clip_obs)
        return self.obs_dict

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.pre_physics_step(torch.clamp(actions, -self.clip_actions, self.clip_actions))
        self.steps += 1  # one step of physics for every row, finished or not
        self.steps[self.poison] = float("nan")
        self.post_physics_step()
        late = self.progress_buf >= self.max_episode_length - 1
        self.timeout_buf = late & (self.reset_buf != 0)
        self.extras["time_outs"] = self.timeout_buf.to(self.rl_device)
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -self.clip_obs, self.clip_obs)
        if self.num_states > 0:
            self.obs_dict["states"] = self.get_state()
        rew, reset = self.rew_buf.to(self.rl_device), self.reset_buf.to(self.rl_device)
        return self.obs_dict, rew, reset, self.extras

    def pre_physics_step(self, actions: torch.Tensor) -> None:
        self.applied[:] = actions

    def post_physics_step(self) -> None:
        raise NotImplementedError

    def reset_idx(self, rows: torch.Tensor) -> None:
        self.episode[rows] += 1
        self.steps[rows] = 0
        self.start[rows] = torch.rand(len(rows))  # torch's global generator, as in the real tasks
        self.progress_buf[rows] = 0
        self.reset_buf[rows] = 0

    def reset_ended(self) -> None:
        rows = self.reset_buf.nonzero(as_tuple=False).squeeze(-1)
        if len(rows) > 0:
            self.reset_idx(rows)

    def compute_observations(self) -> None:
        self.obs_buf[:, 0] = self.episode
        self.obs_buf[:, 1] = self.steps
        self.obs_buf[:, 2] = self.start
        self.obs_buf[:, 3] = self.applied[:, 0]
        if self.num_states > 0:
            self.states_buf[:, 0] = 10 * self.episode + self.steps
            self.states_buf[:, 1] = self.row
            self.states_buf[:, 2] = 10 * CLIP_OBS

    def failed(self) -> torch.Tensor:
        return self.steps == fails_at(self.row, self.episode)

    def compute_reward(self) -> None:
        self.rew_buf[:] = 100 * self.episode + self.steps
        self.extras["consecutive_successes"] = self.rew_buf.mean()
        ones = torch.ones_like(self.reset_buf)
        reset = torch.where(self.failed(), ones, self.reset_buf)
        late = self.progress_buf >= self.max_episode_length - 1
        self.reset_buf[:] = torch.where(late, ones, reset)


class Cartpole(VecTask):
    """Resets between physics and observation, as Cartpole, Ant and Humanoid do."""

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        self.reset_ended()
        self.compute_observations()
        self.compute_reward()


class ShadowHand(Cartpole):
    """The same, with states for the critic."""

    num_states = 3


class BallBalance(VecTask):
    """Resets before the physics: the first observation of an episode is one step into it."""

    def pre_physics_step(self, actions: torch.Tensor) -> None:
        self.reset_ended()
        super().pre_physics_step(actions)

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        self.compute_observations()
        self.compute_reward()


class AnymalTerrain(VecTask):
    """Resets within the step, rebinds reset_buf as bools, and clears progress_buf before the base
    class computes time_outs from it. Its constructor resets once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reset_idx(torch.arange(self.num_envs))

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        late = self.progress_buf >= self.max_episode_length - 1
        self.reset_buf = self.failed()
        self.reset_buf = torch.where(late, torch.ones_like(self.reset_buf), self.reset_buf)
        self.rew_buf = 100.0 * self.episode + self.steps
        rows = self.reset_buf.nonzero(as_tuple=False).flatten()
        if len(rows) > 0:
            self.reset_idx(rows)
            self.reset_buf[rows] = 1
        self.compute_observations()


isaacgym_task_map: dict[str, Any] = {
    task.__name__: task for task in (AnymalTerrain, BallBalance, Cartpole, ShadowHand)
}
BASE = ModuleType("isaacgymenvs.tasks.base.vec_task")
LAST: list[VecTask] = []
"""The task that `make` made last: what a test looks into."""


def make(
    seed: int,
    task: str,
    num_envs: int,
    sim_device: str,
    rl_device: str,
    graphics_device_id: int = -1,
    headless: bool = False,
    multi_gpu: bool = False,
    virtual_screen_capture: bool = False,
    force_render: bool = True,
    cfg: Any = None,
) -> VecTask:
    """isaacgymenvs.make: the configuration of the task, then the task."""
    config = {
        "env": {"numEnvs": num_envs, "clipActions": 1.0},
        "sim": {"use_gpu_pipeline": sim_device.startswith("cuda")},
    }
    env: VecTask = isaacgym_task_map[task](config, rl_device, sim_device)
    BASE.EXISTING_SIM = object()  # type: ignore[attr-defined]  # create_sim keeps it in its module
    LAST[:] = [env]
    return env


def install(patch: pytest.MonkeyPatch) -> None:
    """Both packages as they are where isaacgym was imported first."""
    for name in MODULES:
        patch.setitem(sys.modules, name, ModuleType(name))
    BASE.EXISTING_SIM = None  # type: ignore[attr-defined]
    patch.setitem(sys.modules, BASE.__name__, BASE)
    patch.setattr(sys.modules["isaacgymenvs"], "make", make, raising=False)
    tasks = sys.modules["isaacgymenvs.tasks"]
    patch.setattr(tasks, "isaacgym_task_map", dict(isaacgym_task_map), raising=False)


def write_packages(folder: Path, supports_python: bool = True) -> None:
    """Both packages as files, whose import makes the checks that the real ones make."""
    isaacgym = folder / "isaacgym"
    isaacgym.mkdir()
    (isaacgym / "__init__.py").write_text("from isaacgym import gymapi\n")
    binding = "" if supports_python else "raise RuntimeError('No gym module found for Python')\n"
    (isaacgym / "gymapi.py").write_text(f"from . import gymdeps\n{binding}")
    (isaacgym / "gymdeps.py").write_text(
        "import sys\n"
        "if 'torch' in sys.modules:\n"
        "    raise ImportError('PyTorch was imported before isaacgym modules.')\n"
    )
    envs = folder / "isaacgymenvs"
    (envs / "tasks" / "base").mkdir(parents=True)
    (envs / "__init__.py").write_text("from tests.envs.sim.fake_isaacgym import make\n")
    (envs / "tasks" / "__init__.py").write_text(
        "from tests.envs.sim.fake_isaacgym import isaacgym_task_map\n"
    )


def remove(patch: pytest.MonkeyPatch) -> None:
    """Neither package is in sys.modules, whatever other tests left there."""
    for name in MODULES:
        patch.delitem(sys.modules, name, raising=False)
