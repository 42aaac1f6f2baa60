"""Where actor processes come from: a server process that has torch loaded and forks on request.

A fresh interpreter spends a second and 140 MB on importing torch. A fork of one that has it shares
that memory and starts at once, which also makes restarting a dead actor cheap. What an actor gets
is pickled all the same, so whatever runs here runs where processes are spawned.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from unirl.host import is_stopped
from unirl.supervision.process_settings import LEARNERS_SIGNALS
from unirl.supervision.temp_folders import claim

log = logging.getLogger(__name__)

_PRELOAD = "unirl.supervision.preload"
# One message to the server carries at most 253 file descriptors (Linux's SCM_MAX_FD), and an actor
# needs one for each event, and some more.
_MAX_PROCESSES = 200


def process_context(
    num_processes: int, modules: Iterable[str] = (), preload: Iterable[str] = ()
) -> ForkServerContext | SpawnContext:
    """What to make processes with; the server is started by the first call.

    modules: what these processes import; of them only UniRL's own are loaded beforehand, since a
    user's may start threads, which do not survive a fork. preload: others that start none.
    """
    if num_processes > _MAX_PROCESSES:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    own = [name for name in modules if name.startswith("unirl.")]
    context.set_forkserver_preload([*own, *preload, _PRELOAD])
    with interrupts_blocked(), _search_path_in_environment():
        forkserver.ensure_running()
    claim(Path(util.get_temp_dir()))  # where the server listens
    return context


def fork_now(
    modules: Iterable[str] = (), preload: Iterable[str] = (), *, beside_threads: bool = False
) -> None:
    """Let the server be a fork of this process, which has imported what a run needs; it need not do
    that once more when the first run asks for it. modules, preload: see process_context.

    For commands, which call it before anything is made: what this process starts later, threads of
    libraries above all, does not survive a fork. Otherwise nothing is done, and `process_context`
    starts the server as a fresh interpreter. beside_threads: where these are not a run's, and hold
    nothing that its processes need, as those of a Ray worker.
    """
    is_alone = beside_threads or threading.active_count() == 1
    if sys.platform != "linux" or _server_pid() is not None or not is_alone:
        return
    resource_tracker.ensure_running()
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        process_context(1, modules, preload)
    finally:
        util.spawnv_passfds = spawn


def _fork(_: object, arguments: Sequence[str], passed_fds: Sequence[int]) -> int:
    """In place of a fresh interpreter with these arguments, which end with `-c` and code."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in passed_fds:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(fd)
        # As in a fresh interpreter: this one's lock is held, by the thread that has just forked.
        vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))
        exec(arguments[-1], {})
    os._exit(0)


def parent_pid(context: ForkServerContext | SpawnContext) -> int:
    """Who will be the parent of a process made with this context: the server, or this process.

    A process cannot find out by itself: the one that adopts it looks like its parent.
    """
    if isinstance(context, SpawnContext):
        return os.getpid()
    wake_server()
    with interrupts_blocked():
        forkserver.ensure_running()  # or a dead server would be replaced when its pid is out
    pid = _server_pid()
    assert pid is not None
    return pid


def wake_server() -> None:
    """Let the server run where something stopped it: without it no process starts, and none is
    known to have ended.
    """
    pid = _server_pid()
    if pid is not None and is_stopped(pid):
        log.warning("the fork server (process %d) is stopped: woken", pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def end_server() -> None:
    """Kill the server, and with it the processes of runs; another is started when it is needed."""
    pid = _server_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _server_pid() -> int | None:
    # No public name says it.
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


@contextlib.contextmanager
def _search_path_in_environment() -> Iterator[None]:
    """A server that is started meanwhile finds modules wherever this process does.

    Not every Python tells it `sys.path`, and what it cannot preload it passes over in silence:
    each actor would then import torch by itself.
    """
    if _server_pid() is not None:  # other threads may be reading the environment
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if isinstance(path, str))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """The learner's signals wait in this thread, and in processes started meanwhile until they
    unblock them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEARNERS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
