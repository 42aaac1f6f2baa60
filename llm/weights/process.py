"""Which process is meant: a number alone may come to belong to another one, so its start time goes
with it. Source: /proc/PID/stat of Linux.
"""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" when there is none."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def is_running(pid: int, began: str) -> bool:
    """Not gone, not a zombie, and not another one under the same number."""
    fields = _stat(pid)
    return bool(fields) and fields[19] == began and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [] when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
