"""The processes that an engine brought up, so that none is left behind. Source: none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Family:
    """Processes born while an engine started, and their children. Processes are told by number and
    start time: a number alone may come to belong to somebody else.
    """

    def __init__(self) -> None:
        self._members: dict[int, str] = {}
        self.core = 0
        """The first of them: vLLM's EngineCore."""

    @contextmanager
    def born(self) -> Iterator[None]:
        """Direct children of this process that appear inside belong to the family."""
        before = set(_children(os.getpid()))
        try:
            yield
        finally:
            for pid in _children(os.getpid()):
                if pid not in before and not _is_helper(pid):
                    self._members[pid] = _started(pid)
                    self.core = self.core or pid

    def note_children(self) -> None:
        """Remember who is below by now: they cannot be found any more when the core is dead."""
        for pid in list(self._members):
            for child in _descendants(pid):
                self._members.setdefault(child, _started(child))

    def alive(self) -> bool:
        """Whether the core is; True as long as it is not known."""
        return not self.core or _runs(self.core, self._members[self.core])

    def kill(self, seconds: float = 5.0) -> None:
        """End all that still runs, children included; returns when they are gone."""
        self.note_children()
        end = time.monotonic() + seconds
        for pid, began in self._members.items():
            if _runs(pid, began):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while time.monotonic() < end:
            if not any(_runs(pid, began) for pid, began in self._members.items()):
                return
            time.sleep(0.02)


def _runs(pid: int, began: str) -> bool:
    """Not gone, not a zombie, and not another one under the same number."""
    fields = _stat(pid)
    return bool(fields) and fields[19] == began and fields[0] not in "ZX"


def _started(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """What the kernel says of it, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        pass
    return sorted(found)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


def _is_helper(pid: int) -> bool:
    """Python's own resource tracker serves the whole process and outlives engines."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return b"resource_tracker" in command
