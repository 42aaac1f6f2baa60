"""Environments whose steps take milliseconds, for measurements of who waits for whom."""

from __future__ import annotations

import multiprocessing
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete


class Sleepy(gymnasium.Env[Any, Any]):
    """A step takes step_seconds, that of the first one made in worker 0 slow_factor times that."""

    num_made = 0

    def __init__(self, step_seconds: float = 0.005, slow_factor: float = 1.0) -> None:
        self.observation_space, self.action_space = Box(0, 1, (4,), np.float32), Discrete(2)
        first = Sleepy.num_made == 0 and multiprocessing.current_process().name.endswith("worker-0")
        Sleepy.num_made += 1
        self._seconds = step_seconds * (slow_factor if first else 1.0)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        self._step += 1
        return np.full(4, self._step % 100 / 100, np.float32), 1.0, self._step % 100 == 0, False, {}


class SlowCartPole(CartPoleEnv):
    """Something to learn, of which a step waits, or computes, for so long."""

    def __init__(self, step_seconds: float = 0.005, computes: bool = False) -> None:
        super().__init__()
        self._seconds, self._computes = step_seconds, computes

    def step(self, action: Any) -> Any:
        until = time.thread_time() + self._seconds
        while self._computes and time.thread_time() < until:
            pass
        if not self._computes:
            time.sleep(self._seconds)
        return super().step(action)


def fail(number: int, frame: Any) -> None:
    raise RuntimeError("an error at a random moment, as asked for")


# Whichever process imports this for its environments can be made to fail from outside.
signal.signal(signal.SIGUSR1, fail)
if "unirl-bench/Sleepy-v0" not in gymnasium.registry:
    gymnasium.register("unirl-bench/Sleepy-v0", Sleepy)
    gymnasium.register("unirl-bench/SlowCartPole-v0", SlowCartPole, max_episode_steps=500)
