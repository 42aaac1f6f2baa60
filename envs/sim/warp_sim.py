"""Many worlds of one MuJoCo model, stepped together by MuJoCo Warp: one recorded graph per
environment step, on the CPU and on CUDA. (MuJoCo Warp 4.0, github.com/google-deepmind/mujoco_warp.)
"""

# mypy: disable-error-code="index, no-any-return, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from unirl.envs.device import POLICY, Groups, SimSpec, SimStep
from unirl.errors import UniRLError

COUNTERS = ("nan_states", "constraint_overflows", "contact_overflows", "solver_limits")
"""What `WarpEnv.counters` tells. nan_states: worlds reset because their state, or the action they
got, was not finite.
constraint_overflows: steps of a world with more constraints than njmax, the surplus dropped.
contact_overflows: the same for contacts; the batch shares one buffer, so every world counts.
solver_limits: steps of a world in which the solver stopped at its limit of iterations (harmless
where the limit is small on purpose)."""

TOO_LARGE = wp.constant(1.0e10)
"""Beyond this C MuJoCo calls a state diverged (mjMAXVAL)."""
CONSTRAINT_OVERFLOW = wp.constant(
    int(mjw.OverflowType.NEFC | mjw.OverflowType.NJMAX_NNZ | mjw.OverflowType.NVMAX)
)
CONTACT_OVERFLOW = wp.constant(
    int(mjw.OverflowType.BROADPHASE | mjw.OverflowType.NARROWPHASE | mjw.OverflowType.CCD)
)
SOLVER_LIMIT = wp.constant(int(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS))


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
class Task:
    """A robot and its rules; see the files of the robots."""

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


class Worlds:
    """Model, state and buffers of N worlds. Warp and torch see the same memory, and no pointer ever
    changes, so that everything may be recorded.

    Arrays of Warp: model, data, and those with `wp_` in front; tensors of torch: the rest.
    """

    def __init__(self, task: Task, mjm: Any, num_worlds: int, device: torch.device) -> None:
        self.num_worlds, self.mjm = num_worlds, mjm
        self.obs_size = task.obs_size
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


class WarpEnv:
    """A task on N worlds, behind the interface of envs/device.py."""

    def __init__(
        self, task: Task, num_envs: int, device: torch.device, *, record: bool = True
    ) -> None:
        """Compiles the kernels (half a minute per model, once per machine: Warp keeps them in
        WARP_CACHE_PATH), runs them once and records one step. record=False launches every kernel
        from Python instead, for comparison.

        Raises ValueError or NotImplementedError for a model that MuJoCo Warp cannot run.
        """
        wp.init()
        self._task, self._device = task, device
        self._wp_device = wp.device_from_torch(device)
        self._mjm = mjm = task.load()
        self.spec = SimSpec(
            id=task.id,
            num_envs=num_envs,
            observation={POLICY: task.obs_size},
            action_space=spaces.Box(-1.0, 1.0, (int(mjm.nu),)),
            max_episode_length=task.max_episode_length,
            device=device,
            step_dt=float(mjm.opt.timestep) * task.physics_steps,
            physics_steps=task.physics_steps,
            follows_stream=True,
        )
        start = task.start(mjm)
        self._normal_qvel = start.normal_qvel
        self._generator = torch.Generator(device=device)
        self._graph: Any = None
        self._renderer: Any = None
        with wp.ScopedDevice(self._wp_device):
            self.worlds = Worlds(task, mjm, num_envs, device)
            self._start = [
                wp.array(values, dtype=float)
                for values in (
                    start.qpos,
                    start.qpos_noise,
                    start.qpos_low,
                    start.qpos_high,
                    start.qvel_noise,
                )
            ]
            self._kernels = task.kernels(self.worlds)
        worlds = self.worlds
        self._obs: Groups = {POLICY: worlds.obs}
        self._step = SimStep(
            obs=self._obs,
            reward=worlds.reward,
            terminated=worlds.terminated,
            truncated=worlds.truncated,
            final_obs={POLICY: worlds.final_obs},
            valid=worlds.valid,
            extras={},
        )
        self._action_shape = worlds.ctrl.shape
        self._counters = {name: worlds.counts[i] for i, name in enumerate(COUNTERS)}
        self.reset(0)
        with self._on_device():
            # Kernels compile at their first launch, which may not fall into a recording.
            self._advance()
        if record:
            with self._beside(), wp.ScopedCapture() as capture:
                self._advance()
            self._graph = capture.graph
        worlds.counts.zero_()

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """First observations of new episodes; see DeviceEnv."""
        worlds = self.worlds
        self._generator.manual_seed(seed)
        self._draw()
        worlds.done.fill_(True)
        worlds.valid.fill_(True)
        worlds.ctrl.zero_()
        with self._on_device():
            self._restart()
            self._kernels.observe()
        if random_phases:
            worlds.episode_steps.random_(0, self.spec.max_episode_length, generator=self._generator)
        else:
            worlds.episode_steps.zero_()
        return self._obs

    def step(self, action: Tensor) -> SimStep:
        """One step of every world; `action` float32 [N, A], clipped to [-1, 1]; see DeviceEnv.

        Raises UniRLError for another shape.
        """
        if action.shape != self._action_shape:
            raise UniRLError(
                f'env "{self.spec.id}" got actions of shape {list(action.shape)}',
                f"{list(self._action_shape)} is what {self.spec.num_envs} environments take",
                "correct the policy's output",
            )
        torch.clamp(action, -1.0, 1.0, out=self.worlds.ctrl)
        self._draw()
        if self._graph is None:
            with self._on_device():
                self._advance()
        else:
            wp.capture_launch(self._graph, stream=self._stream())
        return self._step

    def generators(self) -> Sequence[torch.Generator]:
        """None: a recorded step cannot be part of another recording; see DeviceEnv."""
        return ()

    def counters(self) -> Mapping[str, Tensor]:
        """Totals since the environments were made; see COUNTERS."""
        return self._counters

    def frame(self, world: int = 0, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
        """[height, width, 3] picture of one world, drawn by C MuJoCo. Waits for the device; needs
        OpenGL (MUJOCO_GL=egl or osmesa where there is no display).
        """
        mjm = self._mjm
        if self._renderer is None or self._renderer.width != width:
            self._close_renderer()
            mjm.vis.global_.offwidth = max(width, mjm.vis.global_.offwidth)
            mjm.vis.global_.offheight = max(height, mjm.vis.global_.offheight)
            self._renderer = mujoco.Renderer(mjm, height, width)
            self._renderer_data = mujoco.MjData(mjm)
        data = self._renderer_data
        data.qpos[:] = self.worlds.qpos[world].cpu().numpy()
        mujoco.mj_forward(mjm, data)
        self._renderer.update_scene(data, camera="track" if mjm.ncam else -1)
        image: NDArray[np.uint8] = self._renderer.render()
        return image

    def close(self) -> None:
        """Let go of the recorded step and of the renderer; idempotent."""
        self._graph = None
        self._close_renderer()

    def _advance(self) -> None:
        self._kernels.before()
        for _ in range(self._task.physics_steps):
            mjw.step(self.worlds.model, self.worlds.data)
        self._kernels.score()
        self._judge()
        self._restart()
        self._kernels.observe()

    def _judge(self) -> None:
        w, d = self.worlds, self.worlds.data
        w.launch(
            judge,
            [
                d.qpos,
                d.qvel,
                d.ctrl,
                d.overflow,
                w.wp_final_obs,
                w.wp_reward,
                w.wp_terminated,
                w.wp_truncated,
                w.wp_valid,
                w.wp_done,
                w.wp_episode_steps,
                w.wp_counts,
                self.spec.max_episode_length,
            ],
        )

    def _restart(self) -> None:
        w, d = self.worlds, self.worlds.data
        w.launch(
            restart,
            [
                *(w.wp_done, *self._start, w.wp_qpos_draw, w.wp_qvel_draw),
                *(d.qpos, d.qvel, d.qacc_warmstart, d.time, d.overflow),
            ],
        )

    def _draw(self) -> None:
        # For all rows at once, though only done worlds use theirs: asking which would wait.
        worlds = self.worlds
        worlds.qpos_draw.uniform_(-1.0, 1.0, generator=self._generator)
        if self._normal_qvel:
            worlds.qvel_draw.normal_(generator=self._generator)
        else:
            worlds.qvel_draw.uniform_(-1.0, 1.0, generator=self._generator)

    def _stream(self) -> Any:
        # Torch's, so that kernels and tensors keep their order without any waiting.
        if self._device.type != "cuda":
            return None
        return wp.stream_from_torch(torch.cuda.current_stream(self._device))

    def _on_device(self) -> Any:
        stream = self._stream()
        return wp.ScopedDevice(self._wp_device) if stream is None else wp.ScopedStream(stream)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a stream of its own: CUDA records nothing on the default one."""
        if self._device.type != "cuda":
            with self._on_device():
                yield
            return
        side: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with wp.ScopedStream(wp.stream_from_torch(side)):
            yield
        current.wait_stream(side)

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


@wp.kernel
def judge(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    action: wp.array2d[float],
    overflow: wp.array[int],
    final_obs: wp.array2d[float],
    reward: wp.array[float],
    terminated: wp.array[bool],
    truncated: wp.array[bool],
    valid: wp.array[bool],
    done: wp.array[bool],
    episode_steps: wp.array[int],
    counts: wp.array[wp.int64],
    max_episode_length: int,
) -> None:
    """Ends episodes: by the task's own rule, by the limit of time, or for a state gone wrong."""
    w = wp.tid()
    sound = wp.isfinite(reward[w])
    for i in range(qpos.shape[1]):
        sound = sound and wp.abs(qpos[w, i]) < TOO_LARGE
    for i in range(qvel.shape[1]):
        sound = sound and wp.abs(qvel[w, i]) < TOO_LARGE
    # The physics clips actions, which would turn one that is no number into a number.
    for i in range(action.shape[1]):
        sound = sound and wp.isfinite(action[w, i])
    for i in range(final_obs.shape[1]):
        sound = sound and wp.isfinite(final_obs[w, i])
    steps = episode_steps[w] + 1
    ended = sound and terminated[w]
    cut = sound and not ended and steps >= max_episode_length
    if not sound:
        reward[w] = 0.0
        wp.atomic_add(counts, 0, wp.int64(1))
    terminated[w] = ended
    truncated[w] = cut
    valid[w] = sound
    over = ended or cut or not sound
    done[w] = over
    episode_steps[w] = wp.where(over, 0, steps)
    flags = overflow[w]
    if flags != 0:
        if (flags & CONSTRAINT_OVERFLOW) != 0:
            wp.atomic_add(counts, 1, wp.int64(1))
        if (flags & CONTACT_OVERFLOW) != 0:
            wp.atomic_add(counts, 2, wp.int64(1))
        if (flags & SOLVER_LIMIT) != 0:
            wp.atomic_add(counts, 3, wp.int64(1))
        overflow[w] = 0


@wp.kernel
def restart(
    done: wp.array[bool],
    mean: wp.array[float],
    qpos_noise: wp.array[float],
    qpos_low: wp.array[float],
    qpos_high: wp.array[float],
    qvel_noise: wp.array[float],
    qpos_draw: wp.array2d[float],
    qvel_draw: wp.array2d[float],
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    qacc_warmstart: wp.array2d[float],
    time: wp.array[float],
    overflow: wp.array[int],
) -> None:
    """New initial states, in worlds that are done only."""
    w = wp.tid()
    if not done[w]:
        return
    for i in range(qpos.shape[1]):
        value = mean[i] + qpos_noise[i] * qpos_draw[w, i]
        qpos[w, i] = wp.clamp(value, qpos_low[i], qpos_high[i])
    for i in range(qvel.shape[1]):
        qvel[w, i] = qvel_noise[i] * qvel_draw[w, i]
        # The solver starts from the last acceleration, which a diverged world would hand on.
        qacc_warmstart[w, i] = 0.0
    time[w] = 0.0
    overflow[w] = 0
