"""Processes of an inference engine end with the process that wants it, whatever ends that one:
vLLM's EngineCore does not notice by itself that nobody is left to ask it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from pathlib import Path

OWNER = "UNIRL_ENGINE_OWNER"
"""Environment variable: "pid:start" of the process whose end is to be shared."""


def owner_tag() -> str:
    """What OWNER must say for this process to be the owner."""
    return f"{os.getpid()}:{_started(os.getpid())}"


def hold_on() -> None:
    """Watch the owner and this process's parent (the engine's core, or the owner itself) from a
    thread: when either is gone, kill the parent and this process. Without an owner: nothing.
    """
    tag = os.environ.get(OWNER, "")
    if not tag:
        return
    owner, parent = int(tag.split(":")[0]), os.getppid()
    core = parent if parent not in (owner, 1) else 0
    threading.Thread(target=_wait, args=(owner, tag, core), name="lifeline", daemon=True).start()


def _wait(owner: int, tag: str, core: int) -> None:
    watched = []
    try:
        watched.append(os.pidfd_open(owner))
        if core:
            watched.append(os.pidfd_open(core))
    except OSError:
        _end(core)
    # The number may belong to another process by now: start times tell them apart.
    if f"{owner}:{_started(owner)}" != tag:
        _end(core)
    # Readable when the process has ended, also as a zombie.
    select.select(watched, [], [])
    _end(core)


def _end(core: int) -> None:
    if core and os.getppid() == core:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
