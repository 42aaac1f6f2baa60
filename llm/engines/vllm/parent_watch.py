"""Processes of an inference engine end with the process that wants it, whatever ends that one:
vLLM's EngineCore does not notice by itself that no process is left to ask it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time

from unirl.llm.weights.process import is_running, start_time

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
OWNER = "UNIRL_ENGINE_OWNER"
"""Environment variable: "pid:start" of the process whose end is to be shared."""


def owner_tag() -> str:
    """What OWNER must say for this process to be the owner."""
    return f"{os.getpid()}:{start_time(os.getpid())}"


def watch_owner() -> None:
    """Watch the owner and this process's parent (the engine's core, or the owner itself) from a
    thread: when either is gone, kill the parent and this process. Without an owner: nothing.
    """
    tag = os.environ.get(OWNER, "")
    if not tag:
        return
    number, _, began = tag.partition(":")
    owner, parent = int(number), os.getppid()
    core = parent if parent not in (owner, 1) else 0
    watch = threading.Thread(
        target=_watch, args=(owner, began, core), name="parent-watch", daemon=True
    )
    watch.start()


def _watch(owner: int, began: str, core: int) -> None:
    try:
        _wait(owner, began, core)
    except OSError as error:
        # Old kernels and some containers have no pidfd_open.
        log.warning(
            "ends of processes cannot be waited for (%s): looked for every %g s instead",
            error,
            _LOOK_SECONDS,
        )
        while is_running(owner, began) and (not core or os.getppid() == core):
            time.sleep(_LOOK_SECONDS)
    _end(core)


def _wait(owner: int, began: str, core: int) -> None:
    """Until either has ended. Raises OSError where the kernel does not let it wait."""
    try:
        watched = [os.pidfd_open(pid) for pid in (owner, core) if pid]
    except ProcessLookupError:
        return
    # The number may belong to another process by now: start times tell them apart.
    if start_time(owner) == began:
        # Readable when the process has ended, also as a zombie.
        select.select(watched, [], [])


def _end(core: int) -> None:
    if core and os.getppid() == core:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
