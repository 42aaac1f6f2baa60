"""Sandboxes of each level for tests, each with an event loop that outlives one test."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.llm import podman
from unirl.errors import UniRLError
from unirl.llm.sandbox.config import LevelName, SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes

T = TypeVar("T")
CONFINED: tuple[LevelName, ...] = ("zygote+cgroup", "zygote", "bwrap", "landlock")
CONTAINERS: tuple[LevelName, ...] = ("container", "container+kernel")
_SYSTEM = "/usr/bin/python3"


class Held:
    """Sandboxes, and the loop they belong to."""

    def __init__(self, name: LevelName, **settings: Any) -> None:
        self.name = name
        self._runner = asyncio.Runner()
        self.sandboxes: Any = self._runner.run(make_sandboxes(config_for(name, **settings)))

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(what)

    def close(self) -> None:
        self._runner.run(self.sandboxes.close())
        self._runner.close()


def hold(name: LevelName, **settings: Any) -> Iterator[Held]:
    try:
        held = Held(name, **settings)
    except UniRLError as error:
        pytest.skip(f"this machine has no sandboxes of level {name}: {error}")
    yield held
    held.close()


def config_for(name: LevelName, **settings: Any) -> SandboxConfig:
    """Skips the test where this machine has no containers, and they are asked for."""
    if name not in CONTAINERS:
        return SandboxConfig(kind=name, python=python_for(name), **settings)  # type: ignore[arg-type]
    daemon = podman.daemon("runc" if name == "container" else podman.gvisor())
    return SandboxConfig(kind="container", image=podman.IMAGE, daemon=daemon, **settings)


def python_for(name: str) -> str:
    """Without namespaces of our own the interpreter must be one that another user may read."""
    if name.startswith("zygote") or os.geteuid() != 0 or _all_may_pass(Path(sys.base_prefix)):
        return ""
    return _SYSTEM if os.path.exists(_SYSTEM) else ""


def _all_may_pass(path: Path) -> bool:
    return all(each.stat().st_mode & stat.S_IXOTH for each in (path, *path.parents))


def processes(marker: str) -> list[int]:
    """Of this machine, those that have the marker among their arguments."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if marker.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found
