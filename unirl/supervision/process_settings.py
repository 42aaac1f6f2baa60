"""Settings of a whole process that training wants: a name, memory that is kept, and an end together
with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel (Linux) to send this process a signal when its parent dies; does nothing on
    other systems.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


LEARNERS_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP})
"""What a terminal sends to all processes of a run: Ctrl-C, and that it was closed. To end in good
order is the learner's decision.
"""


def leave_signals_to_learner() -> None:
    """Ignore them in this process, and in those that it starts."""
    for number in LEARNERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEARNERS_SIGNALS)


def name_process(name: str) -> None:
    """What `top` and `ps` call this process; the kernel (Linux) keeps 15 bytes of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def share_freed_memory() -> None:
    """Tell glibc to serve all threads from one heap: what one frees, another one gets. To be called
    before threads are started.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks: handing each back to the system costs a factor of 1.5
    to 2.3 at large batches.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for option, num_bytes in (
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, 1 << 30),
        (_M_TOP_PAD, 1 << 24),
    ):
        libc.mallopt(option, num_bytes)
