"""What the machine and torchrun say of this process: the cores it may use, and its number there.

Standard library only: it is read by the lowest layers, and where nothing else is installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process' number among those that torchrun started on this machine; None: not started
    by it.
    """
    rank = environment.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() else None


def micros() -> int:
    """Microseconds of the monotonic clock, which all processes of a machine share."""
    return time.monotonic_ns() // 1000
