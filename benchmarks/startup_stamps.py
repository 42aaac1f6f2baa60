"""Runs `unirl` as `python -m unirl` does, and writes down when its start-up has come how far.

The file that UNIRL_STAMPS names gets a line each of name, seconds of the system's monotonic clock,
and CPU seconds of the learner's process so far.

    UNIRL_STAMPS=stamps.txt python benchmarks/startup_stamps.py train @cartpole

It hangs on functions that old commits have too, so that two of them can be compared.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Stamps:
    """When each name was first reached; flush writes them, before anything else can end the run."""

    def __init__(self) -> None:
        self._times: dict[str, tuple[float, float]] = {}
        self._pid = os.getpid()
        self.num_made, self.making_seconds = 0, 0.0

    def reach(self, name: str) -> None:
        """Now, if it was not reached before."""
        self._times.setdefault(name, (time.monotonic(), time.process_time()))

    def flush(self) -> None:
        """Write all, once."""
        if self._times and os.getpid() == self._pid:  # not in a fork
            values = {**self._times, "made": (self.making_seconds, self.num_made)}
            path = os.environ["UNIRL_STAMPS"]
            with open(path + ".tmp", "w") as file:
                for name, (seconds, more) in values.items():
                    file.write(f"{name} {seconds} {more}\n")
            os.replace(path + ".tmp", path)
            self._times = {}


STAMPS = Stamps()


def on_cli(module: Any) -> None:
    main = module.main

    def stamped(*arguments: Any) -> Any:
        STAMPS.reach("command")
        return main(*arguments)

    module.main = stamped


def on_registry(module: Any) -> None:
    find = module.recipe

    def stamped(name: str) -> Any:
        found = find(name)
        STAMPS.reach("recipe")
        plan = found.plan

        def stamped_plan(config: Any) -> Any:
            STAMPS.reach("defaults")
            made = plan(config)
            STAMPS.reach("plan")
            return made

        found.plan = stamped_plan
        return found

    module.recipe = stamped


def on_loop(module: Any) -> None:
    update = module.TrainLoop._update

    def stamped(self: Any, take: Callable[[], Any]) -> Any:
        STAMPS.reach("started")

        def stamped_take() -> Any:
            batch = take()
            STAMPS.reach("batch")
            return batch

        updated = update(self, stamped_take)
        STAMPS.reach("update")
        STAMPS.flush()
        return updated

    module.TrainLoop._update = stamped


def counted(make: Callable[..., Any]) -> Callable[..., Any]:
    """Environments that this process makes, and for how long."""

    def stamped(*arguments: Any, **settings: Any) -> Any:
        started = time.monotonic()
        try:
            return make(*arguments, **settings)
        finally:
            STAMPS.num_made += 1
            STAMPS.making_seconds += time.monotonic() - started

    return stamped


def on_registration(module: Any) -> None:
    module.make, module.make_vec = counted(module.make), counted(module.make_vec)


WATCHED: dict[str, Callable[[Any], None]] = {
    "unirl.cli": on_cli,
    "unirl.registry": on_registry,
    "unirl.runners.loop": on_loop,
    "gymnasium.envs.registration": on_registration,
}


class Watcher(importlib.abc.MetaPathFinder):
    """Lets a function see each watched module when it has been imported, before others use it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        see = WATCHED.pop(name, None)
        spec = importlib.util.find_spec(name) if see is not None else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def watched(module: ModuleType) -> None:
            execute(module)
            assert see is not None
            see(module)

        spec.loader.exec_module = watched  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    STAMPS.reach("interpreter")
    sys.path.pop(0)  # this folder: its modules would be mistaken for others
    sys.meta_path.insert(0, Watcher())
    runpy.run_module("unirl", run_name="__main__", alter_sys=True)
