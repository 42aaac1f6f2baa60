"""What a tree of processes costs: CPU seconds and memory, as Linux shows them in /proc (proc(5)).

Memory is PSS (`smaps_rollup`), so a page that several processes share is counted once; CPU time is
that of every process of the tree, reaped children included. Standard library only: it is also read
where nothing of UniRL is installed. Elsewhere than on Linux all is empty and 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unirl.host import usable_cores


@dataclass(frozen=True)
class ProcessInfo:
    """One process as it stood when it was looked at."""

    name: str
    """What the kernel calls it: 15 bytes at most."""
    state: str
    parent: int
    session: int
    start_ticks: int
    """With the id, names a process for good: an id alone may be given to another one later."""
    cpu_seconds: float


def tree(root: int) -> dict[int, ProcessInfo]:
    """The process `root`, its descendants, and all of the session that it leads, by id."""
    # Descendants by parent, and all of the session: an orphan is adopted by init, but stays in it.
    found = dict(_processes())
    members = {pid for pid, one in found.items() if pid == root or one.session == root}
    grown = True
    while grown:
        children = {pid for pid, one in found.items() if one.parent in members} - members
        members |= children
        grown = bool(children)
    return {pid: found[pid] for pid in members}


def cpu_seconds(processes: Mapping[int, ProcessInfo]) -> float:
    return sum(one.cpu_seconds for one in processes.values())


def tree_cpu_seconds(root: int) -> float:
    """CPU seconds used so far by `root` and its descendants, with the children they have reaped."""
    return cpu_seconds(tree(root))


def memory_mb(pids: Iterable[int]) -> float:
    """PSS of these processes together, in MB (10^6 bytes)."""
    return sum(map(_pss_bytes, pids)) / 1e6


def alive(seen: Mapping[int, ProcessInfo]) -> dict[int, ProcessInfo]:
    """Those that still run: the same processes, not others that were given their ids."""
    now = dict(_processes())
    return {
        pid: one
        for pid, one in seen.items()
        if pid in now and now[pid].start_ticks == one.start_ticks and now[pid].state != "Z"
    }


def kill(seen: Mapping[int, ProcessInfo]) -> None:
    for pid in alive(seen):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def machine_cpu_seconds() -> float | None:
    """CPU seconds that all processes of the machine have used since it started; None: unknown.

    Also where this process may not use every core: others there do not disturb it.
    """
    if usable_cores() != os.cpu_count():
        return None
    for line in lines("/proc/stat")[:1]:
        user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")
    return None


def lines(path: str) -> list[str]:
    """The lines of a file in /proc; none where it is gone."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # the process ended between the listing and the reading
        return []


def _processes() -> Iterator[tuple[int, ProcessInfo]]:
    if not os.path.isdir("/proc/self"):
        return
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name stands in parentheses and may hold spaces: count fields after the last.
                head, tail = Path(entry.path, "stat").read_text().rsplit(")", 1)
                fields = tail.split()
                yield (
                    int(entry.name),
                    ProcessInfo(
                        name=head.split("(", 1)[1],
                        state=fields[0],
                        parent=int(fields[1]),
                        session=int(fields[3]),
                        start_ticks=int(fields[19]),
                        cpu_seconds=sum(map(int, fields[11:15])) / ticks_per_second,
                    ),
                )


def _pss_bytes(pid: int) -> int:
    for line in lines(f"/proc/{pid}/smaps_rollup"):
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
