"""A measurement in a tree of processes of its own: its memory and CPU time are known, and nothing
of it stays behind.
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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from unirl.bench import usage
from unirl.bench.apart import measure_apart
from unirl.bench.end_to_end import measure_end_to_end
from unirl.bench.stages import Figures, StageName
from unirl.errors import UniRLError, format_error
from unirl.runners.plan import Plan
from unirl.supervision.fork_server import interrupts_blocked
from unirl.supervision.process_settings import die_with_parent, keep_freed_memory
from unirl.supervision.temp_folders import claim, disclaim

_SAMPLE_SECONDS = 0.5
_START_SECONDS = 120.0
_GRACE_SECONDS = 12.0
"""How long a trial may take to end its processes: longer than a runner takes."""


def run_trial(plan: Plan, seconds: float, *, apart: bool = False) -> dict[StageName, Figures]:
    """Figures of each stage measured, with the `peak_memory_mb` of the process tree.

    apart: one actor and the learner in turns, stage by stage; else the plan end to end. Raises
    UniRLError for whatever ends the trial. However it ends, no process is left.
    """
    log_dir = Path(tempfile.mkdtemp(prefix="unirl-bench-"))
    claim(log_dir)
    try:
        figures = _run(plan, seconds, apart, log_dir)
    except KeyboardInterrupt:
        shutil.rmtree(log_dir)
        raise
    except BaseException:
        disclaim(log_dir)  # the logs stay: they say why
        raise
    shutil.rmtree(log_dir)
    return figures


def _run(plan: Plan, seconds: float, apart: bool, log_dir: Path) -> dict[StageName, Figures]:
    # Spawned: a fork of this process would share its memory, and count only half of it.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (plan, seconds, apart, log_dir, sender, os.getpid())
    process = context.Process(target=_main, args=arguments, name="unirl-bench")
    try:
        with interrupts_blocked():  # Ctrl-C is for this process, which ends the other
            process.start()
        sender.close()
        limit_seconds = _START_SECONDS + plan.learner.queue.timeout_seconds + 3 * seconds
        return _follow(process, receiver, limit_seconds, log_dir)
    finally:
        if process.pid is not None:
            _end(process, usage.tree(process.pid))
        receiver.close()


def _follow(
    process: BaseProcess, receiver: Connection, limit_seconds: float, log_dir: Path
) -> dict[StageName, Figures]:
    """Sample the memory of the tree until the process has reported."""
    assert process.pid is not None
    peak_mb, deadline = 0.0, time.monotonic() + limit_seconds
    while not receiver.poll(_SAMPLE_SECONDS):
        peak_mb = max(peak_mb, usage.memory_mb(usage.tree(process.pid)))
        if time.monotonic() > deadline:
            raise UniRLError(
                "the measurement does not end",
                f"it was given {limit_seconds:.0f} s",
                f"see {log_dir}, or raise queue.timeout_seconds",
            )
    try:
        outcome: dict[StageName, Figures] | UniRLError = receiver.recv()
    except EOFError:
        process.join(_GRACE_SECONDS)
        outcome = UniRLError(
            f"the process that measures ended with exit code {process.exitcode}",
            "it should have reported figures",
            f"see its output in {log_dir}",
        )
    if isinstance(outcome, UniRLError):
        raise outcome
    return {stage: {**one, "peak_memory_mb": peak_mb} for stage, one in outcome.items()}


def _end(process: BaseProcess, seen: dict[int, usage.ProcessInfo]) -> None:
    """End what may still run: SIGTERM, and SIGKILL after a grace period."""
    process.terminate()
    process.join(_GRACE_SECONDS)
    deadline = time.monotonic() + 1.0
    # Helpers of multiprocessing end by themselves as soon as those they help are gone.
    while usage.alive(seen) and time.monotonic() < deadline:
        time.sleep(0.02)
    usage.kill(seen)
    process.join()


def _main(
    plan: Plan, seconds: float, apart: bool, log_dir: Path, sender: Connection, parent_pid: int
) -> None:
    """What the process does: measure, report, leave nothing behind."""
    os.setsid()  # Ctrl-C reaches the terminal's group only
    die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output = log_dir / "output.txt"
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)  # engines print their names
        os.dup2(file.fileno(), 2)
    keep_freed_memory()
    threads = plan.runner.learner_threads
    if threads or plan.runner.kind != "inline":
        torch.set_num_threads(threads or 1)
    try:
        if apart:
            sender.send(measure_apart(plan, seconds))
        else:
            sender.send({"end_to_end": measure_end_to_end(plan, seconds, log_dir)})
    except UniRLError as error:
        sender.send(without_run(error, output))
    except Exception as error:
        traceback.print_exc()
        sender.send(UniRLError(format_error(error), remedy=f"full trace: {output}"))


def without_run(error: UniRLError, output: Path) -> UniRLError:
    """The error without advice that only a run can follow: a trial has no run folder, and nothing
    of it can be resumed. output: where its log is.
    """
    return UniRLError(
        *(
            part.replace("the run's log.txt", str(output)).replace(
                "`unirl resume`", "measure again"
            )
            for part in error.parts
        )
    )
