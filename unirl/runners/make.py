"""The runner that a plan asks for: the one place where its kind decides something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from unirl.runners.config import RunnerConfig
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import Agree, Hook, TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.processes import ProcessesRunner


class Runner(Protocol):
    """Executes a plan."""

    loops: list[TrainLoop]
    """One for each learner."""

    def run(self, hooks: Sequence[Hook], *others: Sequence[Hook]) -> None:
        """Train until a hook stops a loop. others: the hooks of further learners."""

    def restart_actors(self) -> None:
        """What a checkpoint asks for: runners that repeat bit for bit restart their actors."""

    def close(self) -> None:
        """End what it started; idempotent."""


def make_runner(
    plan: Plan, *, log_dir: Path | None = None, rank: int = 0, agree: Agree | None = None
) -> Runner:
    """The plan's runner; nothing is started. rank, agree: see InlineRunner."""
    if plan.runner.is_inline:
        return InlineRunner(plan, rank=rank, agree=agree)
    return ProcessesRunner(plan, log_dir=log_dir)


@contextmanager
def learner_threads(config: RunnerConfig) -> Iterator[None]:
    """Torch threads of the learner's process for the time of the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.learner_threads or (before if config.is_inline else 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
