"""Runs a plan in a run folder: runner, logs, checkpoints, evaluations, and an end in good order."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from unirl.config import to_toml
from unirl.core.checkpoint import load_checkpoint
from unirl.core.evaluator import EvalResult
from unirl.core.seeding import derive_seed
from unirl.report.console import Console, make_console
from unirl.report.sinks import JsonlSink, Sink, TensorBoardSink
from unirl.runners import state
from unirl.runners.hooks import CheckpointHook, EvalHook, LogHook, RowWriter, StopHook
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import Hook, TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.process_settings import keep_freed_memory
from unirl.runners.processes import ProcessesRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    num_steps: int
    """Samples learned, earlier sessions included."""
    version: int
    """Updates made."""
    seconds: float
    """Training time after start-up, earlier sessions included."""
    reason: str
    """total_steps, target_return, max_seconds or interrupted."""
    checkpoint: Path | None
    """The newest checkpoint."""
    last_eval: EvalResult | None
    """The newest evaluation while training."""
    scalars: dict[str, float]
    """The last row of metrics."""


def run(
    plan: Plan, run_dir: Path | str, *, resume: Path | None = None, console: bool = True
) -> RunResult:
    """Train a plan until it ends; everything it leaves lies in `run_dir`.

    resume: a run folder or checkpoint to continue from. console: whether to show progress on
    standard output.
    Ctrl-C or SIGTERM once: the update under way is finished and a checkpoint written. Twice:
    KeyboardInterrupt.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = load_checkpoint(resume) if resume is not None else None
    if checkpoint is not None:
        state.check_fingerprint(plan, checkpoint)
    if plan.config is not None:
        (run_dir / "config.toml").write_text(to_toml(plan.config, recipe=plan.recipe))
    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(_log_file(run_dir / "log.txt"))
        stack.enter_context(_threads(plan))
        log.info("plan:\n%s", plan.describe())
        runner = _make_runner(plan, run_dir)
        stack.callback(runner.close)
        if checkpoint is not None:
            state.restore(runner.loop, checkpoint)
        step = runner.loop.learner.num_steps
        sinks: list[Sink] = [
            JsonlSink(run_dir / "metrics.jsonl", resume_step=step if checkpoint else None),
            TensorBoardSink(run_dir / "tb", resume_step=step if checkpoint else None),
        ]
        for sink in sinks:
            stack.callback(sink.close)
        rows: list[RowWriter] = list(sinks)
        if console:
            screen = make_console(run_dir.name, plan.run.total_steps, run_dir)
            stack.callback(screen.close)
            rows.append(_ConsoleRows(screen))
        log_hook = LogHook(rows, plan.run.log_seconds)
        save_hook = CheckpointHook(run_dir, plan.run.checkpoint_steps, runner.begin_anew)
        hooks: list[Hook] = [
            StopHook(plan.run.target_return, plan.run.max_seconds, window=plan.run.target_window),
            log_hook,
        ]
        eval_hook = _make_eval_hook(plan, run_dir)
        if eval_hook is not None:
            hooks.append(eval_hook)
        hooks.append(save_hook)
        stack.enter_context(_stop_on_signals(runner.loop))
        runner.run(hooks)
        loop = runner.loop
        log.info(
            "ended: %s after %d steps, %.1f s", loop.reason, loop.learner.num_steps, loop.seconds
        )
        return RunResult(
            loop.learner.num_steps,
            loop.learner.version,
            loop.seconds,
            loop.reason or "",
            save_hook.path,
            eval_hook.result if eval_hook is not None else None,
            log_hook.scalars,
        )


def _make_runner(plan: Plan, run_dir: Path) -> InlineRunner | ProcessesRunner:
    if plan.runner.kind == "inline":
        return InlineRunner(plan)
    return ProcessesRunner(plan, log_dir=run_dir / "logs")


def _make_eval_hook(plan: Plan, run_dir: Path) -> EvalHook | None:
    if plan.run.eval_steps == 0 or plan.make_evaluator is None:
        return None
    return EvalHook(
        partial(plan.make_evaluator, derive_seed(plan.run.seed, "evaluation")),
        run_dir,
        every_steps=plan.run.eval_steps,
        num_episodes=plan.run.eval_episodes,
        deterministic=plan.run.eval_deterministic,
    )


class _ConsoleRows:
    """The console as something that rows are written to."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One row."""
        self._console.update(step, scalars)


@contextmanager
def _threads(plan: Plan) -> Iterator[None]:
    """Torch threads of the learner's process for the time of the run."""
    before = torch.get_num_threads()
    wanted = plan.runner.learner_threads or (before if plan.runner.kind == "inline" else 1)
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("unirl")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


@contextmanager
def _stop_on_signals(loop: TrainLoop) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the loop in good order, the second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if loop.reason is not None:
            raise KeyboardInterrupt
        loop.stop("interrupted")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
