"""Ranks as processes of this machine."""

from __future__ import annotations

import os
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from unirl.descendants import Marks
from unirl.launch.ranks.ranks import RankProcess, RankSetup, follow
from unirl.runners.plan import Plan
from unirl.runners.pool_processes import modules_of
from unirl.supervision.fork_server import interrupts_blocked, parent_pid, process_context
from unirl.supervision.worker import Job, ParentWatch, process_main


class RankProcesses:
    """See RankStarter."""

    host, sends = "127.0.0.1", False

    def __init__(self, plan: Plan, log_dir: Path | None) -> None:
        self._threads, self._log_dir = plan.runner.learner_threads or 1, log_dir
        learner = plan.learner
        modules, preload = modules_of(plan)
        own = getattr(learner.make, "func", learner.make).__module__
        self._context = process_context(learner.ranks, [*modules, own], preload)
        self._parent_watch, self._marks = ParentWatch(), Marks()
        self._pipes: dict[int, Connection] = {}

    def prepare(self) -> None:
        """There is room."""

    def start(self, setup: RankSetup) -> RankProcess:
        theirs, self._pipes[setup.rank] = self._context.Pipe()
        receiver, report = self._context.Pipe(duplex=False)
        name = f"rank {setup.rank}"
        log_name = f"rank-{setup.rank:03d}.txt"
        job = Job(
            name=name,
            work=partial(follow, setup, theirs),
            num_threads=self._threads,
            niceness=0,
            log_path=self._log_dir / log_name if self._log_dir is not None else None,
            parent_watch=self._parent_watch,
            report=report,
            parent_pid=parent_pid(self._context),
            mark=self._marks.new(),
            environ=dict(os.environ),
        )
        process = self._context.Process(target=process_main, args=(job,), name=f"unirl-{name}")
        with interrupts_blocked():  # until the child ignores it, Ctrl-C would kill it
            process.start()
        for each in (report, receiver, theirs):
            each.close()
        return process

    def connection(self, rank: int, process: RankProcess) -> Connection:
        return self._pipes.pop(rank)

    def end(self) -> None:
        self._marks.end()

    def close(self) -> None:
        self._marks.close()
        self._parent_watch.close()
