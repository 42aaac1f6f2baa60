"""The lock of a queue's table between processes: a record lock, which the kernel frees when its
holder dies.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from unirl.errors import DeadlineExceeded, LockHeld
from unirl.host import is_stopped
from unirl.transports.memory import SharedBlock

LOCK_SECONDS = 30.0
STOPPED_SECONDS = 2.0
"""What a holder is given that is seen to be stopped, where this process may end it."""
_LOOK_SECONDS = 0.25
_LOCK_TRIES = 20
"""Before the first sleep."""
# Not every system has it.
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


class ProcessLock(AbstractContextManager[object]):
    """Excludes other processes and other threads of this one. A wait has a deadline."""

    end_holder: Callable[[LockHeld], bool] | None = None
    """How this process ends another that has held the lock for too long; whether it did. The kernel
    frees the lock then."""

    def __init__(self) -> None:
        self._block = SharedBlock(8, "unirl-lock")  # for its descriptor; nobody reads the bytes
        # Record locks exclude processes, not threads of one process. The thread that waits for the
        # record lock holds this one, so it is free after 2 * LOCK_SECONDS at the latest.
        self._thread_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"block": self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._block, self._thread_lock = state["block"], threading.Lock()

    def __enter__(self) -> object:
        if not self._thread_lock.acquire(timeout=3 * LOCK_SECONDS):
            raise DeadlineExceeded(
                f"a thread of process {os.getpid()} has held the queue lock {3 * LOCK_SECONDS:g} s"
            )
        try:
            fcntl.lockf(self._block.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            try:
                self._lock_with_deadline()
            except BaseException:
                self._thread_lock.release()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._block.fd, fcntl.LOCK_UN)
        self._thread_lock.release()

    def _lock_with_deadline(self) -> None:
        started = time.monotonic()
        deadline, ended_holder = started + LOCK_SECONDS, False
        look_at, num_stopped = started + _LOOK_SECONDS, 0
        for num_tries in itertools.count():
            # The lock is held for microseconds, and even the shortest sleep takes several times as
            # long: only a holder that does not run is worth it.
            if num_tries < _LOCK_TRIES:
                _yield_core()
            else:
                time.sleep(20e-6)
            try:
                fcntl.lockf(self._block.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                now = time.monotonic()
                if now >= look_at and self.end_holder is not None:
                    look_at = now + _LOOK_SECONDS
                    # Looks are counted, not time: all may have been stopped together.
                    num_stopped = num_stopped + 1 if is_stopped(self.holder()) else 0
                if now < deadline and num_stopped * _LOOK_SECONDS < STOPPED_SECONDS:
                    continue
                pid = self.holder()
                held = LockHeld(
                    pid,
                    f"process {pid or '?'} has held the queue lock {now - started:.0f} s",
                    "it is held for microseconds by a process that runs",
                    "the process is stopped or hung: kill it",
                )
                if ended_holder or self.end_holder is None or not self.end_holder(held):
                    raise held from error
                deadline, ended_holder, num_stopped = now + LOCK_SECONDS, True, 0

    def holder(self) -> int:
        """The id of the process that holds the lock; 0 where the system has no known way to ask."""
        if sys.platform != "linux" or sys.maxsize < 2**32:
            return 0
        # struct flock: type, whence, start, length, process
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(
            "hhqqi4x", fcntl.fcntl(self._block.fd, fcntl.F_GETLK, lock)
        )
        return 0 if kind == fcntl.F_UNLCK else int(pid)
