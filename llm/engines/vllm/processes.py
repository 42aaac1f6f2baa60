"""The processes that an engine brought up, so that none is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unirl.llm.weights.process import is_running, start_time

_KILL_SECONDS = 5.0


class EngineProcesses:
    """Processes that began while an engine started, and their children. Any thread may ask."""

    def __init__(self) -> None:
        self._began: dict[int, str] = {}
        """Start times by number."""
        self._lock = threading.Lock()
        self._starting: tuple[int, frozenset[int]] | None = None
        """While an engine starts: the thread that does it, and its children from before."""
        self.core = 0
        """The first of them: vLLM's EngineCore."""

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Children of this thread that appear inside are the engine's: from the moment they do, for
        they may have to be ended before this ends.
        """
        thread = threading.get_native_id()
        with self._lock:
            self._starting = thread, frozenset(_children_of_thread(os.getpid(), thread))
        try:
            yield
        finally:
            self.note_children()
            with self._lock:
                self._starting = None

    def note_children(self) -> None:
        """Note the descendants so far: they cannot be found any more when the core is dead."""
        with self._lock:
            if self._starting is not None:
                thread, before = self._starting
                for pid in _children_of_thread(os.getpid(), thread):
                    if pid not in before and not _is_helper(pid):
                        self._began.setdefault(pid, start_time(pid))
                        self.core = self.core or pid
            for pid in list(self._began):
                for child in descendants(pid):
                    self._began.setdefault(child, start_time(child))

    def alive(self) -> bool:
        """Whether the core is; True as long as it is not known."""
        return not self.core or is_running(self.core, self._began[self.core])

    def kill(self) -> None:
        """End all that still runs, children included; returns when they are gone."""
        self.note_children()
        end = time.monotonic() + _KILL_SECONDS
        with self._lock:
            began = dict(self._began)
        for pid, start in began.items():
            if is_running(pid, start):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while time.monotonic() < end:
            if not any(is_running(pid, start) for pid, start in began.items()):
                return
            time.sleep(0.02)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += _children_of_thread(pid, int(task.name))
    return sorted(found)


def _children_of_thread(pid: int, thread: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _is_helper(pid: int) -> bool:
    """Python's own resource tracker serves the whole process and outlives engines."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return b"resource_tracker" in command
