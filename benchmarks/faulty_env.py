"""A pole on a cart whose step takes 5 ms, and that does on demand what environments must not do.

To want a fault, put a file into the folder `wanted`: the first process that finds it in a
step, or while an environment is made, moves it to `met`, writes its number there, and does what the
name of the file says.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

from unirl.transports.locks import ProcessLock

PRINT_SECONDS = 1.0


class Faulty(CartPoleEnv):
    """program: how long the programs sleep that the first environment of each process starts."""

    first_of: int | None = None

    def __init__(self, folder: str, program: str, step_seconds: float = 0.005) -> None:
        super().__init__()
        self._folder, self._program, self._seconds = Path(folder), program, step_seconds
        self._wanted, self._stepped = f"{folder}/wanted", False
        self._kept: list[Any] = []
        if self._meets("hang while it is made"):
            hang()
        if Faulty.first_of != os.getpid():
            Faulty.first_of = os.getpid()
            self._start_programs()

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        if not self._stepped:
            self._stepped = True
            (self._folder / "stepped" / str(os.getpid())).touch()
        obs, reward, terminated, truncated, info = super().step(action)
        for name in os.listdir(self._wanted):
            if name in IN_A_STEP and self._meets(name):
                terminated = IN_A_STEP[name](self)
        return obs, reward, terminated, truncated, info

    def _meets(self, name: str) -> bool:
        met = self._folder / "met" / name
        try:
            os.rename(f"{self._wanted}/{name}", met)
        except FileNotFoundError:
            return False
        aside = met.with_suffix(".aside")
        aside.write_text(f"{os.getpid()} {time.monotonic()}")
        aside.replace(met)
        return True

    def _start_programs(self) -> bool:
        """In a session of its own, one of them nobody's child; both without our variables."""
        command = f"(sleep {self._program} &) ; exec sleep {self._program}"
        subprocess.Popen(["setsid", "sh", "-c", command], env={"PATH": os.environ["PATH"]})
        return False

    def _print(self) -> bool:
        until = time.monotonic() + PRINT_SECONDS
        while time.monotonic() < until:
            print("x" * 65_535)
        return False

    def _eat(self) -> bool:
        # As fast as the kernel can: sooner than a step may take.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        while True:
            self._kept.append(mmap.mmap(-1, 2**28, flags=flags))

    def _stop_with_the_lock(self) -> bool:
        with contextlib.ExitStack() as held:
            for lock in [each for each in gc.get_objects() if isinstance(each, ProcessLock)]:
                held.enter_context(lock)
            os.kill(os.getpid(), signal.SIGSTOP)
        return False

    def _raise(self) -> bool:
        raise RuntimeError("an error at a random moment, as asked for")


def hang() -> bool:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(600)


IN_A_STEP: dict[str, Callable[[Faulty], Any]] = {
    "hang in a step": lambda env: hang(),
    "sys.exit": lambda env: sys.exit(0),
    "None as terminated": lambda env: None,
    "an exception": Faulty._raise,
    "prints without end": Faulty._print,
    "starts programs with setsid": Faulty._start_programs,
    "eats memory": Faulty._eat,
    "stops with the lock": Faulty._stop_with_the_lock,
}
if "unirl-bench/Faulty-v0" not in gymnasium.registry:
    gymnasium.register("unirl-bench/Faulty-v0", Faulty, max_episode_steps=500)
