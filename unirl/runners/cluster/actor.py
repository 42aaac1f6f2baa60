"""The process of a node agent, as Ray starts it. It imports torch once, for itself and, by a fork,
for all members.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import pickle
import platform
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unirl.errors import UniRLError
from unirl.host import available_memory
from unirl.runners.cluster.shipping import Parcel, arrive
from unirl.supervision.fork_server import fork_now, process_context

_LINGER_SECONDS = 10.0
"""A process that ends by itself is a fault to Ray, which says so to the user."""
_MIB = 2**20


def versions() -> dict[str, str]:
    """Of what must be the same on all machines; builds of torch for other devices are."""
    found = {"python": platform.python_version(), "unirl": sys.modules["unirl"].__version__}
    for name in ("ray", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name).partition("+")[0]
    return found


@dataclass(frozen=True)
class NodeNeeds:
    """What a node must have before anything is started there."""

    versions: Mapping[str, str]
    memory_bytes: int
    """Of slots and weights, which a node reserves as a whole."""
    shm_bytes: int
    """In /dev/shm: for what environments' own processes share, and what GPUs send each other."""

    def check(self, node: str) -> None:
        """UniRLError where this machine is not fit."""
        own = versions()
        other = [name for name, version in self.versions.items() if own.get(name) != version]
        if other:
            has = ", ".join(f"{name} {own.get(name, 'none')}" for name in other)
            raise UniRLError(
                f"node {node} has {has}",
                "the learner's process has "
                + ", ".join(f"{name} {self.versions[name]}" for name in other)
                + ", and versions must be the same on all machines",
                "install these on the node, or use one image for all; unirl doctor --ray.address "
                "compares nodes",
            )
        try:
            disk = os.statvfs("/dev/shm")
            free = disk.f_bavail * disk.f_frsize
        except OSError:
            free = 0
        if free < self.shm_bytes:
            raise UniRLError(
                f"node {node} has too little shared memory",
                f"{free / _MIB:,.0f} MiB are free in /dev/shm, and {self.shm_bytes / _MIB:,.0f} "
                "MiB are needed",
                "docker run --shm-size 8g, or mount a larger tmpfs at /dev/shm",
            )
        memory, whose = available_memory()
        if 0 < memory < self.memory_bytes:
            raise UniRLError(
                f"node {node} has too little memory for the slots and weights of the run",
                f"{whose} has {memory / _MIB:,.0f} MiB left, and {self.memory_bytes / _MIB:,.0f} "
                "MiB are needed",
                "use fewer slots (queue.batch_size, queue.max_staleness) or shorter unrolls, or a "
                "node with more",
            )


class AgentActor:
    """search_path, folder: where the driver finds modules. modules, preload: of the fork server.
    parcel: what of them a machine may lack.
    """

    def __init__(
        self,
        search_path: list[str],
        folder: str,
        modules: list[str],
        preload: list[str],
        needs: NodeNeeds,
        parcel: Parcel | None,
    ) -> None:
        self._unpacked: Path | None = None
        self._error: UniRLError | None = None
        self._name = socket.gethostname()
        try:
            needs.check(self._name)
        except UniRLError as error:
            self._error = error  # raised here it would be Ray's own error, with a trace
            return
        self._unpacked = arrive(search_path, folder, parcel)
        importlib.import_module("unirl.runners.cluster.agent")
        fork_now(modules, preload, beside_threads=True)
        process_context(1, modules, preload)  # where there was none to fork

    def start(self, setup: bytes) -> int:
        """Start members; the process id when they run. setup: an AgentSetup of the driver, which
        came by Ray's own connection.
        """
        if self._error is not None:
            raise self._error
        from unirl.runners.cluster.agent import NodeAgent, run_agent

        try:
            found = pickle.loads(setup)
        except (ImportError, AttributeError) as error:
            raise UniRLError(
                f"node {self._name} lacks what the plan names: {error}",
                "actors and what they import must be importable on each node, and not be defined "
                "in the script that is run",
                "put it into a module of its own, and name its folder as ray.working_dir",
            ) from None
        work = (NodeAgent(found), _LINGER_SECONDS, self._end)
        threading.Thread(target=run_agent, args=work, name="agent", daemon=True).start()
        return os.getpid()

    def _end(self) -> None:
        if self._unpacked is not None:
            shutil.rmtree(self._unpacked, ignore_errors=True)
