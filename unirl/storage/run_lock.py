"""The lock of a run folder: one run at a time writes to it, and a second one is refused.

The kernel holds it (flock) for the process that opened the file, and lets go of it however that
process ends. Its forks close the file at once: one that outlives a killed run keeps no folder
locked. The file is deleted at the end, by the process that holds the lock, so one that got the lock
looks whether the file is still the one of that name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError

log = logging.getLogger(__name__)

NAME = ".lock"
_TRIES = 100


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """In this block no other run writes to the folder, which is made if need be.

    Raises UniRLError when one does, with its process. On a file system without locks: a warning.
    """
    is_new, path = not run_dir.exists(), run_dir / NAME
    held, owner = [_take(run_dir, path)], os.getpid()

    def let_go() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)
    try:
        yield
    finally:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                path.unlink()
            let_go()
            if is_new:
                with contextlib.suppress(OSError):  # it holds something: a run was begun
                    run_dir.rmdir()


def _take(run_dir: Path, path: Path) -> int:
    """An open file that holds the lock."""
    for _ in range(_TRIES):
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a run that was refused took its empty folder away
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise _in_use(run_dir, path) from None
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s): nothing keeps a second run out",
                run_dir,
                error.strerror,
            )
            return descriptor
        if _is_at(descriptor, path):
            mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
            with contextlib.suppress(OSError):  # for people alone
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(mine).encode(), 0)
            return descriptor
        os.close(descriptor)
    raise _in_use(run_dir, path)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _in_use(run_dir: Path, path: Path) -> UniRLError:
    owner: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        owner = json.loads(path.read_text(encoding="utf-8"))
    who, stop = "another process", "stop that run"
    if {"host", "pid", "since"} <= owner.keys():
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        who = f"process {owner['pid']} on host {owner['host']}, since {began}"
        stop = f"stop that run (on {owner['host']}: kill {owner['pid']})"
    return UniRLError(
        f'run folder "{run_dir}" is in use',
        f"one run at a time writes to a folder, and {who} does",
        f"{stop}, or train in a folder of another name; eval, play and plot may read it: "
        f"unirl plot {shlex.quote(str(run_dir))}",
    )
