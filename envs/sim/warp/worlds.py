"""Many worlds of one MuJoCo model: what a task says of it, and the state and buffers that torch and
Warp share.
"""

# mypy: disable-error-code="index, no-any-return, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray
from torch import Tensor

COUNTERS = ("nan_states", "constraint_overflows", "contact_overflows", "solver_limits")
"""What `WarpEnv.counters` holds. nan_states: worlds reset because their state, or the action they
got, was not finite.
constraint_overflows: steps of a world with more constraints than njmax, the surplus dropped.
contact_overflows: the same for contacts; the batch shares one buffer, so every world counts.
solver_limits: steps of a world in which the solver stopped at its limit of iterations (harmless
where the limit is small on purpose)."""


@dataclass(frozen=True)
class Start:
    """How episodes begin: qpos = clip(mean + noise * u), u uniform in [-1, 1]; qvel likewise around
    zero. Arrays [nq] and [nv].
    """

    qpos: NDArray[np.float64]
    qpos_noise: NDArray[np.float64]
    qpos_low: NDArray[np.float64]
    qpos_high: NDArray[np.float64]
    qvel_noise: NDArray[np.float64]
    normal_qvel: bool = False
    """True draws u of the velocities from the standard normal distribution."""


class Kernels(Protocol):
    """What a task computes from the worlds, as launches on the current Warp device."""

    def before(self) -> None:
        """Ahead of the physics: remember what the reward compares with."""

    def score(self) -> None:
        """After the physics: final_obs, reward and terminated of every world."""

    def observe(self) -> None:
        """After the restart: obs of worlds that are done from their new state, of the others a copy
        of final_obs. Where not valid, final_obs is made equal to obs.
        """


@dataclass(frozen=True)
class WarpTask:
    """A robot and its rules; one module of this package each."""

    id: str
    load: Callable[[], Any]
    """The mujoco.MjModel, its timestep and solver set."""
    start: Callable[[Any], Start]
    """Of that model."""
    kernels: Callable[[Worlds], Kernels]
    obs_size: int
    physics_steps: int
    max_episode_length: int
    njmax: int
    """Room for constraints, per world: more than twice the largest number measured in 77 000 random
    steps. More: slower; less than needed: the surplus is dropped, and counted."""
    nconmax: int
    """Room for contacts, per world on average."""


def own_model(file: str) -> Callable[[], Any]:
    path = Path(__file__).parent / "assets" / file
    return lambda: mujoco.MjModel.from_xml_path(str(path))


def gymnasium_model(file: str) -> Callable[[], Any]:
    path = files("gymnasium") / "envs" / "mujoco" / "assets" / file
    return lambda: mujoco.MjModel.from_xml_path(str(path))


class Worlds:
    """Model, state and buffers of N worlds. Warp and torch see the same memory, and no pointer ever
    changes, so that everything may be recorded.

    Arrays of Warp: model, data, and those with `wp_` in front; tensors of torch: the rest.
    """

    def __init__(self, task: WarpTask, mjm: Any, num_worlds: int, device: torch.device) -> None:
        self.num_worlds, self.mjm = num_worlds, mjm
        self.step_dt = float(mjm.opt.timestep) * task.physics_steps
        self.model = mjw.put_model(mjm)
        # The kernels would print at every launch otherwise; judge() counts instead.
        self.model.opt.warn_overflow = 0
        self.data = mjw.make_data(mjm, nworld=num_worlds, njmax=task.njmax, nconmax=task.nconmax)
        self.qpos = wp.to_torch(self.data.qpos)
        self.qvel = wp.to_torch(self.data.qvel)
        self.ctrl = wp.to_torch(self.data.ctrl)
        n, float32, flag = num_worlds, torch.float32, torch.bool

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.obs = zeros(float32, n, task.obs_size)
        self.final_obs = zeros(float32, n, task.obs_size)
        self.reward = zeros(float32, n)
        self.terminated, self.truncated = zeros(flag, n), zeros(flag, n)
        self.valid, self.done = zeros(flag, n), zeros(flag, n)
        self.episode_steps = zeros(torch.int32, n)
        self.counts = zeros(torch.int64, len(COUNTERS))
        self.qpos_draw, self.qvel_draw = zeros(float32, n, mjm.nq), zeros(float32, n, mjm.nv)
        self.wp_obs, self.wp_final_obs = wp.from_torch(self.obs), wp.from_torch(self.final_obs)
        self.wp_reward = wp.from_torch(self.reward)
        self.wp_terminated = wp.from_torch(self.terminated)
        self.wp_truncated = wp.from_torch(self.truncated)
        self.wp_valid, self.wp_done = wp.from_torch(self.valid), wp.from_torch(self.done)
        self.wp_episode_steps = wp.from_torch(self.episode_steps)
        self.wp_counts = wp.from_torch(self.counts)
        self.wp_qpos_draw = wp.from_torch(self.qpos_draw)
        self.wp_qvel_draw = wp.from_torch(self.qvel_draw)

    def launch(self, kernel: Any, inputs: list[Any], dim: int = 0) -> None:
        """One thread per world, or `dim` threads, on the current Warp device."""
        wp.launch(kernel, dim=dim or self.num_worlds, inputs=inputs)
