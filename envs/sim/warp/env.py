"""Many worlds of one MuJoCo model, stepped together by MuJoCo Warp: one recorded graph per
environment step, on the CPU and on CUDA. (MuJoCo Warp 4.0, github.com/google-deepmind/mujoco_warp.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from unirl.envs.device import POLICY, Groups, SimSpec, SimStep
from unirl.envs.sim.warp.episodes import judge, restart
from unirl.envs.sim.warp.worlds import COUNTERS, WarpTask, Worlds
from unirl.errors import UniRLError


class WarpEnv:
    """A task on N worlds, behind the interface of envs/device.py."""

    def __init__(
        self, task: WarpTask, num_envs: int, device: torch.device, *, record: bool = True
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
        self._streams: dict[int, Any] = {}
        self._renderer: Any = None
        with wp.ScopedDevice(self._wp_device):
            self.worlds = Worlds(task, mjm, num_envs, device)
            names = ("qpos", "qpos_noise", "qpos_low", "qpos_high", "qvel_noise")
            self._start = [wp.array(getattr(start, name), dtype=float) for name in names]
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
        """One step of every world; `action` float32 [N, A], clipped to [-1, 1]; see DeviceEnv."""
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
        """None: a recorded step cannot be part of another recording."""
        return ()

    def counters(self) -> Mapping[str, Tensor]:
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
        current = torch.cuda.current_stream(self._device)
        # Kept: Warp registers what it is shown, and lets go of it with the object.
        if current.cuda_stream not in self._streams:
            self._streams[current.cuda_stream] = wp.stream_from_torch(current)
        return self._streams[current.cuda_stream]

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
