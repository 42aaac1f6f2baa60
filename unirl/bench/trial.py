"""One stage measured in a tree of processes of its own: its memory and CPU time are known, and
nothing of it stays behind.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from unirl.bench import usage
from unirl.bench.errors import RemoteTrace, StageCrashed, Unmeasurable, parts_of
from unirl.bench.stages import Figures, StageName, measure
from unirl.errors import UniRLError
from unirl.runners.fork_server import interrupts_blocked
from unirl.runners.plan import Plan
from unirl.runners.process_settings import die_with_parent

_SAMPLE_SECONDS = 0.5
_GRACE_SECONDS = 12.0
"""How long a stage may take to end its processes: longer than a runner takes."""


@dataclass(frozen=True)
class Trial:
    """What is measured."""

    stage: StageName
    plan: Plan
    seconds: float
    """Length of the window, after start and warm-up."""
    rows_per_forward: float | None = None
    """For inference: what was measured end to end."""

    def run(self) -> Figures:
        """Figures of the stage, with `peak_memory_mb` of its tree since the window began.

        Raises Unmeasurable where the plan does not allow it, what ended the plan (UniRLError),
        StageCrashed for anything else. However it ends, no process is left.
        """
        log_dir = Path(tempfile.mkdtemp(prefix="unirl-bench-"))
        try:
            with _process(self, log_dir) as (process, receiver):
                figures = self._follow(process, receiver, log_dir)
        except (Unmeasurable, KeyboardInterrupt):
            shutil.rmtree(log_dir)
            raise
        # After any other error the logs stay: they say why.
        shutil.rmtree(log_dir)
        return figures

    def _follow(self, process: SpawnProcess, receiver: Connection, log_dir: Path) -> Figures:
        """Weigh the tree until the process has reported."""
        assert process.pid is not None
        peak_mb, patience = 0.0, self.plan.queue.timeout_seconds + 120.0
        deadline, begun = time.monotonic() + patience, False
        while True:
            if receiver.poll(_SAMPLE_SECONDS):
                kind, content = _receive(receiver, process, log_dir)
                if kind == "end":
                    return {**content, "peak_memory_mb": peak_mb}
                if kind != "begin":
                    raise _error(kind, content, log_dir)
                deadline, begun = time.monotonic() + 2 * self.seconds + patience, True
            if begun:
                peak_mb = max(peak_mb, usage.memory_mb(usage.tree(process.pid)))
            if time.monotonic() > deadline:
                raise UniRLError(
                    f"stage {self.stage} does not {'end' if begun else 'begin'}",
                    f"it was given {patience:.0f} s more than it measures",
                    f"see {log_dir}, or raise queue.timeout_seconds",
                )


@contextmanager
def _process(trial: Trial, log_dir: Path) -> Iterator[tuple[SpawnProcess, Connection]]:
    # Spawned: a fork of this process would share its memory, and be weighed by half.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_main, args=(trial, log_dir, sender, os.getpid()), name=f"unirl-{trial.stage}"
    )
    seen: dict[int, usage.ProcessInfo] = {}
    try:
        with interrupts_blocked():  # Ctrl-C is for this process, which ends the other
            process.start()
        sender.close()
        yield process, receiver
    finally:
        if process.pid is not None:
            seen = usage.tree(process.pid)
            _end(process, seen)
        receiver.close()


def _end(process: SpawnProcess, seen: dict[int, usage.ProcessInfo]) -> None:
    """End what may still run: kindly, then not."""
    process.terminate()
    process.join(_GRACE_SECONDS)
    deadline = time.monotonic() + 1.0
    # Helpers of multiprocessing end by themselves as soon as those they help are gone.
    while usage.alive(seen) and time.monotonic() < deadline:
        time.sleep(0.02)
    usage.kill(seen)
    process.join()


def _receive(receiver: Connection, process: SpawnProcess, log_dir: Path) -> tuple[str, Any]:
    try:
        kind, content = receiver.recv()
    except EOFError:
        process.join(_GRACE_SECONDS)
        return "crash", f"exit code {process.exitcode}; its output is in {log_dir}"
    return kind, content


def _error(kind: str, content: Any, log_dir: Path) -> Exception:
    if kind == "unmeasurable":
        return Unmeasurable(content)
    if kind == "refused":
        return UniRLError(*content)
    error = StageCrashed(f"a stage of the benchmark failed; its logs are in {log_dir}")
    error.__cause__ = RemoteTrace(content)
    return error


def _main(trial: Trial, log_dir: Path, sender: Connection, parent_pid: int) -> None:
    """What the process does: measure, report, leave nothing behind."""
    os.setsid()  # Ctrl-C reaches the terminal's group only
    die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output = log_dir / "stage.txt"
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)  # engines print their names
        os.dup2(file.fileno(), 2)
    try:
        figures = measure(
            trial.stage,
            trial.plan,
            trial.seconds,
            log_dir,
            lambda: sender.send(("begin", None)),
            trial.rows_per_forward,
        )
        sender.send(("end", figures))
    except Unmeasurable as error:
        sender.send(("unmeasurable", error.what))
    except UniRLError as error:
        sender.send(("refused", parts_of(error, output)))
    except Exception:
        sender.send(("crash", traceback.format_exc()))
