"""What environments start is found and ended, wherever it went.

A program that leaves its group and its session and whose parent is gone is adopted by a process
that knows nothing of it, so neither groups nor parents say whose it is (decision 019). Resource
limits do: every process inherits them, whatever it does, and one of them, RLIMIT_LOCKS, limits
nothing since Linux 2.4. Its value is the mark of who started what. A mark is drawn at random, so
nothing is ended that was not started under it.

    marks = Marks()                      # a run's, and a keeper that ends what is left of a run
    carry(marks.new())                   # in each process of the run, before anything is started
    marks.end(mark)                      # when that process is gone
    marks.close()                        # all of the run

Linux only: elsewhere nothing is marked, and nothing ended. This file is also what the keeper runs,
with the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator

_RLIMIT_LOCKS = 10  # it has no name in Python
_BITS = 20
"""Of a mark: the number of a process within its run."""
_END_SECONDS = 5.0
_KEEPER_SECONDS = 60.0
"""Nobody waits for the keeper, and nobody else ends what it leaves."""
_NAME = b"Max file locks"
_COMPILERS = b"torch/_inductor/compile_worker"
"""Processes that torch keeps for its next compilation."""


class Marks:
    """The marks of one run. Until `close`, a keeper waits for the end of this process, however it
    comes, to end what was started under them.
    """

    def __init__(self) -> None:
        self._all, self._next = _of_run((1 + secrets.randbits(41)) << _BITS), 0
        self._keeper: subprocess.Popen[bytes] | None = None

    def new(self) -> int:
        """A mark that no other process of the run carries."""
        self._next += 1
        return self._all[self._next % len(self._all)]

    def start_keeper(self) -> None:
        """From now on nothing outlives this process."""
        if sys.platform != "linux":
            return
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._all.start), str(os.getpid())],
            stdin=subprocess.PIPE,
            process_group=0,  # what ends a whole group must not end the keeper
        )

    def keep_keeper(self) -> bool:
        """Start another keeper where something ended the first one; whether that was so."""
        gone = self._keeper is not None and self._keeper.poll() is not None
        if gone:
            self.start_keeper()
        return gone

    def end(self, *marks: int, spare: Container[int] = ()) -> int:
        """End all that carry one of these marks, of all of the run where none is given; returns how
        many there were.
        """
        return end_marked(marks or self._all, spare)

    def close(self) -> None:
        """End the keeper, and by that all that is left of the run; idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                keeper.communicate(b"\n", 2 * _END_SECONDS)


@contextlib.contextmanager
def descendants_ended(*, keeper: bool = True) -> Iterator[None]:
    """What this process starts in this block, and what that starts, ends with it. keeper: also
    where this process is killed meanwhile.

    Nothing happens where an outer block does the same, nor where other threads run: what they start
    is not known to be the block's.
    """
    if sys.platform != "linux" or mark_of(os.getpid()) or threading.active_count() > 1:
        yield
        return
    marks, before = Marks(), resource.getrlimit(_RLIMIT_LOCKS)
    if keeper:
        marks.start_keeper()
    carry(marks.new())
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(_RLIMIT_LOCKS, before)
        marks.end(spare=_servers())
        marks.close()


def carry(mark: int) -> None:
    """Mark this process, and what it will start."""
    if sys.platform == "linux":
        # Where the limit may not be changed there are no marks.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(_RLIMIT_LOCKS, (mark, resource.getrlimit(_RLIMIT_LOCKS)[1]))


def mark_of(pid: int) -> int:
    """The mark that a process carries; 0: none, or it is gone."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            value = file.read().partition(_NAME)[2].split(maxsplit=1)[0]
        return int(value) if value.isdigit() and int(value) >> _BITS else 0
    except (OSError, IndexError):
        return 0


def end_marked(
    marks: Container[int], spare: Container[int] = (), seconds: float = _END_SECONDS
) -> int:
    """Kill every process that carries one of these marks, again until none is left: they may be
    starting others. Returns how many there were.
    """
    deadline, ended = time.monotonic() + seconds, set[int]()
    while found := [pid for pid in _processes() if pid not in spare and _runs_under(pid, marks)]:
        ended.update(pid for pid in found if _kill(pid, marks))
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return len(ended)


def _processes() -> list[int]:
    """Of all users: a program may have become another's."""
    if sys.platform != "linux":
        return []
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _runs_under(pid: int, marks: Container[int]) -> bool:
    if mark_of(pid) not in marks:
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _kill(pid: int, marks: Container[int]) -> bool:
    # By a descriptor, and looked at once more: the number may have come to be another's.
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if mark_of(pid) not in marks:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _servers() -> set[int]:
    """Processes that Python and torch keep for the next use."""
    from multiprocessing import forkserver, resource_tracker

    # No public name says them.
    kept = {
        getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None),
        getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None),
    }
    return {pid for pid in kept if pid is not None} | {
        pid for pid in _processes() if _COMPILERS in _command(pid)
    }


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _of_run(first: int) -> range:
    return range(first, first + (1 << _BITS))


def _keep(first: int, parent: int) -> None:
    """The keeper: wait for a word of its parent, or for the parent's end. Not for the end of
    standard input alone: forks of the parent may hold the other end.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # or the keeper of an outer block ends this one
        hard = resource.getrlimit(_RLIMIT_LOCKS)[1]
        resource.setrlimit(_RLIMIT_LOCKS, (hard, hard))
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # it is gone already, and `getppid` says so
        poll.register(os.pidfd_open(parent), select.POLLIN)
    if os.getppid() == parent:
        poll.poll()
    end_marked(_of_run(first), seconds=_KEEPER_SECONDS)


if __name__ == "__main__":
    _keep(*map(int, sys.argv[1:]))
