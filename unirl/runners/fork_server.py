"""Where actor processes come from: a server process that has torch loaded and forks on request.

A fresh interpreter spends a second and 140 MB on importing torch. A fork of one that has it shares
that memory and starts at once, which also makes restarting a dead actor cheap. What an actor gets
is pickled all the same, so whatever runs here runs where processes are spawned.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext

_PRELOAD = "unirl.runners.preload"
# One message to the server carries at most 253 file descriptors (Linux's SCM_MAX_FD), and an actor
# needs one for each bell, and some more.
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
    with interrupts_blocked():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Ctrl-C waits in this thread, and in processes started meanwhile until they unblock it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
