"""An environment whose step waits and computes nothing, for measurements of who waits for whom."""

from __future__ import annotations

import multiprocessing
import signal
import time
from typing import Any

import gymnasium
import numpy as np
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


def fail(number: int, frame: Any) -> None:
    raise RuntimeError("an error at a random moment, as asked for")


# Whichever process imports this for its environments can be made to fail from outside.
signal.signal(signal.SIGUSR1, fail)
if "unirl-bench/Sleepy-v0" not in gymnasium.registry:
    gymnasium.register("unirl-bench/Sleepy-v0", Sleepy)
