"""Says what a process died of where memory ran out: the kernel kills without a word."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from unirl.errors import ActorFailed
from unirl.host import memory_kills, total_memory

_SAMPLE_SECONDS = 1.0
_SAME_SECONDS = 2.0
"""Processes that are found dead so soon after one that memory ran out for died of the same."""
_MORE_LIKELY = 300


class MemoryWatch:
    """Looks what the processes of a run use, while they live."""

    def __init__(self) -> None:
        self._kills, self._found_at, self._sampled_at = memory_kills(), -_SAME_SECONDS, 0.0
        self._used: dict[str, int] = {}

    def sample(self, pids: Iterable[tuple[str, int | None]]) -> None:
        """Note what each process uses, by its name; not more often than is worth it."""
        if (now := time.monotonic()) - self._sampled_at >= _SAMPLE_SECONDS:
            self._sampled_at = now
            found = {name: _own_bytes(pid) for name, pid in pids if pid is not None}
            # One that is dead by now keeps what it had.
            self._used |= {name: used for name, used in found.items() if used}

    def ran_out(self) -> bool:
        """Whether the kernel has killed for memory since this was asked last, or just before."""
        kills, now = memory_kills(), time.monotonic()
        if kills > self._kills:
            self._kills, self._found_at = kills, now
        return now - self._found_at < _SAME_SECONDS

    def needed(self) -> str:
        """What is used and what there is, for a message."""
        used = _own_bytes(os.getpid()) + sum(self._used.values())
        limit, whose = total_memory()
        return (
            f"the learner and {len(self._used)} process(es) need more than {_mib(used)};"
            f" {whose} has {_mib(limit)}"
        )


def ran_out(what: str) -> ActorFailed:
    """The error that ends a run for which there is too little memory. what: see `needed`."""
    return ActorFailed(
        what,
        "no sample was finished before that: another one would need as much",
        "use fewer actors, environments or slots, or allow more memory, then `unirl resume`",
    )


def offer_to_kernel() -> None:
    """Where memory runs out, this process is killed rather than the learner, which can tell."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + _MORE_LIKELY)))


def _own_bytes(pid: int) -> int:
    """What a process uses and shares with no file or other memory of a run."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
