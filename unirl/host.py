"""What the machine and torchrun say of this process: the cores and the memory it may use, and its
number there.

Standard library only: it is read by the lowest layers, and where nothing else is installed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


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


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped this process (Linux; elsewhere False)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def total_memory() -> tuple[int, str]:
    """Bytes that the processes of this machine or of this cgroup may use, and which of the two
    sets the limit; 0 where nothing says so.
    """
    return min(_memory("MemTotal"), key=_known)


def available_memory() -> tuple[int, str]:
    """Bytes that can still be had, and whether the machine or the cgroup has no more; 0 where
    nothing says so.
    """
    return min(_memory("MemAvailable"), key=_known)


def memory_kills() -> int:
    """How often the kernel has ended a process of this cgroup, or where that is not known of this
    machine, because memory ran out.
    """
    for folder in _cgroups():
        for name in ("memory.events", "memory.oom_control"):
            if (kills := _numbers(folder / name).get("oom_kill")) is not None:
                return kills
    return _numbers(Path("/proc/vmstat")).get("oom_kill", 0)


def _known(found: tuple[int, str]) -> float:
    return found[0] or math.inf


def _memory(name: str) -> Iterator[tuple[int, str]]:
    """What the machine calls by this name in its table, and what that is in each cgroup above this
    process.
    """
    machine = _numbers(Path("/proc/meminfo"))
    swap = machine.get("SwapTotal:" if name == "MemTotal" else "SwapFree:", 0)
    yield 1024 * (machine.get(name + ":", 0) + swap) * (name + ":" in machine), "this machine"
    for folder in _cgroups():
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / most)
            if limit is None or limit >= 2**60:  # how version 1 says that there is none
                continue
            if name == "MemAvailable":
                # Files that were read count as used, and are dropped when memory is needed.
                stat = _numbers(folder / "memory.stat")
                files = sum(
                    stat.get(f"total_{kind}_file", stat.get(f"{kind}_file", 0))
                    for kind in ("active", "inactive")
                )
                limit = max(1, limit - (_number(folder / used) or 0) + files)
            yield limit, "the cgroup (container, job)"


def _cgroups() -> Iterator[Path]:
    """The memory cgroups of this process from its own up, in version 2 or 1. In a container the
    path may be that of the host, and only the top is there.
    """
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top = root if number == "0" else root / "memory"
        folder = top / path.lstrip("/")
        while folder.is_relative_to(top):
            if folder.is_dir():
                yield folder
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """The table in a file of the kernel: a name and a number in each line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
