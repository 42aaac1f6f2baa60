"""Processes of tests, forked where torch and transformers are loaded: a fresh interpreter takes
three seconds of a core for the one and eight for both.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from unirl.supervision.fork_server import fork_now, process_context
from unirl.supervision.process_settings import LEARNERS_SIGNALS

MODULES = ("unirl.launch", "unirl.llm.rewards.worker", "unirl.recipes.appo", "unirl.recipes.grpo")
PRELOAD = (
    "transformers.modeling_utils",
    "unirl.report.sinks",
    "tensorboard.compat.proto.event_pb2",
)


def start_server() -> None:
    """Let the fork server of this process load what any test needs. One that runs loads no more."""
    process_context(1, MODULES, PRELOAD)


def start(
    function: Callable[..., Any],
    *arguments: Any,
    environ: Mapping[str, str] | None = None,
    output: Path | None = None,
    errors: Path | None = None,
    forks: bool = True,
) -> BaseProcess:
    """A process that runs a function of a module in this folder, in a session of its own; its exit
    code is what the function returns. output: what it prints is appended there, and what it prints
    as errors to `errors`, if there is such a file. forks: its runs' own fork servers have loaded
    all that it has; False: the function calls `fork_now`, or needs none.
    """
    environ = dict(os.environ) | dict(environ or {})
    work = (os.getcwd(), environ, output, errors or output, forks, function, arguments)
    process = process_context(1, MODULES, PRELOAD).Process(target=_run, args=work)
    process.start()
    return process


def _run(
    folder: str,
    environ: Mapping[str, str],
    output: Path | None,
    errors: Path | None,
    forks: bool,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        if path is not None:
            with path.open("ab") as file:
                os.dup2(file.fileno(), stream.fileno())
    # The fork server blocks the signals that end a learner, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEARNERS_SIGNALS)
    torch.set_num_threads(1)
    if forks:
        fork_now()  # or a run's own server would load all of it once more
    sys.exit(function(*arguments))


@contextmanager
def two_ranks(
    function: Callable[..., Any], *arguments: Any, output: Path | None = None, forks: bool = True
) -> Iterator[list[BaseProcess]]:
    """Ranks 0 and 1 of a training, as torchrun starts them, without torchrun to end one with the
    other. output: a folder for what they print, `0.txt` and `1.txt`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        start(
            function,
            *arguments,
            environ={**meeting, "RANK": rank, "LOCAL_RANK": rank},
            output=output / f"{rank}.txt" if output is not None else None,
            forks=forks,
        )
        for rank in ("0", "1")
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def in_two_ranks(
    function: Callable[..., Any], *arguments: Any, output: Path | None = None, seconds: float = 240
) -> None:
    """Run a function that starts no processes as ranks 0 and 1; both must end well, within the
    time. Where one fails the other is not waited for.
    """
    deadline = time.monotonic() + seconds
    with two_ranks(function, *arguments, output=output, forks=False) as processes:
        while (codes := [process.exitcode for process in processes]) != [0, 0]:
            assert all(code in (None, 0) for code in codes), codes
            assert time.monotonic() < deadline, codes
            wait([process.sentinel for process in processes if process.exitcode is None], 1.0)
