"""A task in pure torch as a DeviceEnv: what all tasks share, from the end of a step to the next
episode's first observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from gymnasium import Space
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import Groups, SimSpec, SimStep
from unirl.envs.sim import episodes


class Motion(Protocol):
    """What a task computes, in place, from the buffers of a World."""

    obs: Groups
    final_obs: Groups

    def move(self, action: Tensor) -> None:
        """Fill world.after: the state after this step."""

    def score(self) -> Tensor | None:
        """Fill world.reward. Returns the task's own rule for an end, bool [N], or None where only
        the time limit ends an episode; world.size holds |world.after|."""

    def observe(self) -> None:
        """Fill obs from world.state, and final_obs from world.after."""


@dataclass(frozen=True)
class TorchTask:
    """A task and its rules; one module of this package each."""

    observation: Mapping[str, int]
    action_space: Space[object]
    max_episode_length: int
    step_dt: float
    state_size: int
    spans: Sequence[float]
    """Number d of `World.noise` is drawn from [-span, span); a reset takes the first state_size."""
    motion: Callable[[World], Motion]
    physics_steps: int = 1
    dtype: torch.dtype = torch.float32
    failure_reward: float | None = None
    """What a step that fails is worth, if not what the task's score says."""


class World:
    """State and buffers of N environments. A state is [D, N]: a kernel then works on whole rows of
    memory, and observations are transposed views of it."""

    def __init__(self, task: TorchTask, num_envs: int, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device
        size, dtype = task.state_size, task.dtype
        self.state, self.after, self.size = (self.buffer(size, dtype) for _ in range(3))
        self.noise = self.buffer(len(task.spans), dtype)
        self.reward, self.size_sum = self.buffer(1)[0], self.buffer(1, dtype)[0]

    def buffer(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros [rows, N]."""
        return torch.zeros((rows, self.num_envs), dtype=dtype, device=self.device)


class TorchEnv:
    """N environments of one task."""

    def __init__(
        self, task: TorchTask, config: EnvConfig, num_envs: int, device: torch.device
    ) -> None:
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation=task.observation,
            action_space=task.action_space,
            max_episode_length=config.max_episode_steps or task.max_episode_length,
            device=device,
            step_dt=task.step_dt,
            physics_steps=task.physics_steps,
            follows_stream=True,
            capturable=True,
        )
        self._world = world = World(task, num_envs, device)
        self.state = world.state
        self.episodes = episodes.Episodes(
            num_envs, self.spec.max_episode_length, len(task.spans), device
        )
        self._motion = task.motion(world)
        self._fresh = world.noise[: task.state_size]
        self._scale = episodes.noise_scale(task.spans, world.state)
        self._failure_reward = task.failure_reward

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        episodes.begin(self.episodes, seed, random_phases)
        episodes.draw_noise(self.episodes, self._scale, self._world.noise)
        self.state.copy_(self._fresh)
        self._motion.observe()
        return self._motion.obs

    def step(self, action: Tensor) -> SimStep:
        world, motion, book = self._world, self._motion, self.episodes
        motion.move(action)
        torch.abs(world.after, out=world.size)
        failed = motion.score()
        episodes.end_step(book, failed, torch.sum(world.size, 0, out=world.size_sum))
        if self._failure_reward is not None:
            world.reward.masked_fill_(book.terminated, self._failure_reward)
        world.reward.masked_fill_(book.invalid, 0.0)

        world.after.nan_to_num_(0.0, 0.0, 0.0)
        episodes.draw_noise(book, self._scale, world.noise)
        torch.where(book.done, self._fresh, world.after, out=world.state)
        motion.observe()
        return SimStep(
            obs=motion.obs,
            reward=world.reward,
            terminated=book.terminated,
            truncated=book.truncated,
            final_obs=motion.final_obs,
            valid=book.valid,
            extras={},
        )

    def counters(self) -> Mapping[str, Tensor]:
        return {"nan_states": self.episodes.nan_states}

    def generators(self) -> Sequence[torch.Generator]:
        return (self.episodes.generator,)

    def close(self) -> None:
        """Nothing is held."""
