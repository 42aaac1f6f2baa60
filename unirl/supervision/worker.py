"""What runs in each process that a run starts: work until the queue is closed, report what went
wrong, never outlive the learner.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch

from unirl.descendants import carry
from unirl.errors import DeadlineExceeded, QueueClosed, Restartable, UniRLError
from unirl.supervision.memory_watch import offer_to_kernel
from unirl.supervision.process_settings import (
    die_with_parent,
    keep_freed_memory,
    leave_signals_to_learner,
    name_process,
)

log = logging.getLogger(__name__)

EXIT_USER_ERROR = 3
"""Exit code of an actor that met an error which restarting does not fix; its report says which."""
_PATIENCE_SECONDS = 60.0
# A report must fit the pipe: it is read only when this process is gone.
_REPORT_CHARACTERS = 4000


class ParentWatch:
    """Readable as end-of-file as soon as the process that made it is gone, however it went."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": DupFd(self.reader)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reader = state["reader"].detach()

    def watch(self) -> None:
        """End this process when the maker's end closes. Call it in the child, after `carry`: what
        ends the maker's descendants may have looked before this one had its mark.
        """
        if select.select([self.reader], [], [], 0.0)[0]:
            os._exit(1)

        def wait() -> None:
            os.read(self.reader, 1)
            os._exit(1)

        threading.Thread(target=wait, name="parent-watch", daemon=True).start()

    def close(self) -> None:
        """Close both ends in the maker's process."""
        os.close(self.reader)
        os.close(self._writer)


@dataclass(frozen=True)
class Job:
    """What a process of a run gets; picklable while it is spawned."""

    name: str
    work: Callable[[], None]
    """What it does until QueueClosed."""
    num_threads: int
    niceness: int
    """Added to what the learner's process has."""
    log_path: Path | None
    parent_watch: ParentWatch
    report: Connection
    parent_pid: int
    """Of the process that makes it: the fork server's, or the learner's."""
    mark: int
    """Of what it starts, see unirl.descendants."""
    environ: Mapping[str, str]
    """A forked process has the fork server's variables, as old as the first process."""


def process_main(job: Job) -> None:
    """Work until the queue closes; exits 0 then, else with a report for the supervisor."""
    die_with_parent(job.parent_pid)
    carry(job.mark)
    offer_to_kernel()
    name_process(job.name.replace("environment", "env"))  # its number would be cut off
    os.nice(job.niceness)  # early: on Linux it is of this thread and of those that it starts
    job.parent_watch.watch()
    os.environ.clear()
    os.environ.update(job.environ)
    leave_signals_to_learner()
    if job.log_path is not None:
        _redirect_output(job.log_path)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    torch.set_num_threads(job.num_threads)
    keep_freed_memory()
    code = _work_and_report(job)
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    # Without interpreter shutdown: engines' own threads may never end, and everything that matters
    # is in the learner's hands.
    os._exit(code)


def _work_and_report(job: Job) -> int:
    """The exit code; what went wrong is in the log and, in short, on its way to the supervisor."""
    try:
        job.work()
    except QueueClosed:
        pass
    except UniRLError as error:
        log.exception("%s stops", job.name)
        if not isinstance(error, DeadlineExceeded):  # after a deadline another one may do better
            _report(job.report, {"parts": [part[:_REPORT_CHARACTERS] for part in error.parts]})
            return EXIT_USER_ERROR
        _report(job.report, _failure(error))
        return 1
    except Exception as error:
        log.exception("%s failed", job.name)
        _report(job.report, _failure(error))
        return 1
    return 0


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)  # below Python: crashes in native code speak here too
    os.dup2(fd, 2)
    os.close(fd)


def _report(connection: Connection, report: dict[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(report).encode())
    except OSError:
        log.warning("nobody reads this actor's report any more")


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, Restartable):
        return {"said": str(error)[:_REPORT_CHARACTERS]}
    return {
        "type": type(error).__name__,
        "message": str(error)[:_REPORT_CHARACTERS],
        "where": _deepest_frame(error),
    }


def _deepest_frame(error: BaseException) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return (
        f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
        if frame is not None
        else "?"
    )
