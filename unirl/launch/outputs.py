"""What a run writes and shows between its updates."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from unirl.core.seeding import derive_seed
from unirl.launch.resume import learner_folder
from unirl.report.console import Console, PlainConsole, Progress, make_console
from unirl.report.log import notes_on
from unirl.report.sinks import JsonlSink
from unirl.report.trackers.tensorboard import TensorBoardSink
from unirl.report.trackers.tracking import Trackers
from unirl.runners.evaluation import EvalHook
from unirl.runners.hooks import (
    CheckpointHook,
    LogHook,
    RowWriter,
    SamplesHook,
    StopHook,
)
from unirl.runners.loop import Hook, TrainLoop

log = logging.getLogger(__name__)


class RunOutputs:
    """The hooks of one learner, of which `index` says where in the run folder everything is that
    they leave. stack: closes what it opens.

    resumed: rows of updates that are made again are cut off. console: whether progress is shown as
    well as logged; None: neither. leader: those of the first learner, at whose checkpoints this one
    is saved, too.
    """

    def __init__(
        self,
        loop: TrainLoop,
        run_dir: Path,
        index: int,
        restart_actors: Callable[[], None],
        *,
        resumed: bool,
        console: bool | None,
        stack: ExitStack,
        leader: RunOutputs | None = None,
    ) -> None:
        folder = learner_folder(run_dir, index)
        folder.mkdir(parents=True, exist_ok=True)
        config, step = loop.plan.run, loop.learner.num_steps
        resume_step = step if resumed else None
        self.evaluate = _make_eval_hook(loop, folder)
        sinks = _open_sinks(loop, folder, resume_step, console, stack)
        trackers = _open_trackers(loop, run_dir, folder, resume_step, stack)
        self.log = LogHook(sinks, config.log_seconds, self.evaluate)
        self.save: CheckpointHook = CheckpointHook(
            folder,
            config.checkpoint_steps,
            restart_actors,
            start_step=step,
            leader=leader.save if leader is not None else None,
        )
        stop = StopHook(config.target_return, config.max_seconds, window=config.target_window)
        samples = SamplesHook(folder, config.log_seconds, resume_step)
        # Evaluated before it is logged: a result is in the row of its step, the last one too.
        hooks: list[Hook | None] = [stop, self.evaluate, trackers, self.log, samples, self.save]
        self.hooks = [hook for hook in hooks if hook is not None]

    def before_log(self, hook: Hook) -> None:
        """Add a hook whose metrics are to be in the row of its step."""
        self.hooks.insert(self.hooks.index(self.log), hook)


def _open_sinks(
    loop: TrainLoop, folder: Path, resume_step: int | None, console: bool | None, stack: ExitStack
) -> list[RowWriter]:
    """Where rows of metrics go. With a console, notes go there as well."""
    metrics = JsonlSink(folder / "metrics.jsonl", resume_step)
    stack.callback(metrics.close)
    rows: list[RowWriter] = [metrics]
    if "tensorboard" in loop.plan.run.track:
        events = TensorBoardSink(folder / "tb", resume_step)
        stack.callback(events.close)
        rows.append(events)
    if console is not None:
        end = loop.plan.run
        begin = partial(Progress, end.total_steps, end.max_seconds)
        # What is shown may be lost with the terminal; the log keeps it.
        lines = PlainConsole(folder.name, begin(), folder, partial(log.info, "%s"))
        stack.callback(lines.close)
        rows.append(_ConsoleRows(lines))
        if console:
            screen = make_console(folder.name, begin(), folder)
            stack.callback(screen.close)
            stack.enter_context(notes_on(screen))
            rows.append(_ConsoleRows(screen, sys.stdout))
    return rows


def _open_trackers(
    loop: TrainLoop, run_dir: Path, folder: Path, resume_step: int | None, stack: ExitStack
) -> Trackers | None:
    config = loop.plan.run
    names = [name for name in config.track if name != "tensorboard"]
    if not names:
        return None
    trackers = Trackers(
        names,
        run_dir,
        folder,
        seed=config.seed,
        project=config.track_project,
        resume_step=resume_step,
    )
    stack.callback(trackers.close)
    return trackers


def _make_eval_hook(loop: TrainLoop, folder: Path) -> EvalHook | None:
    config, make_evaluator = loop.plan.run, loop.learner_plan.make_evaluator
    if config.eval_steps == 0 or make_evaluator is None:
        return None
    return EvalHook(
        partial(make_evaluator, derive_seed(config.seed, "evaluation")),
        folder,
        every_steps=config.eval_steps,
        num_episodes=config.eval_episodes,
        deterministic=config.eval_deterministic,
        start_step=loop.learner.num_steps,
    )


class _ConsoleRows:
    """The console as something that rows are written to."""

    def __init__(self, console: Console, stream: object = None) -> None:
        self._console, self._stream = console, stream

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One row."""
        self._console.update(step, scalars)
        error = getattr(self._stream, "lost", None)
        if error is not None:
            self._stream = None
            self._console.close()
            log.warning(
                "the console is gone (%s); training continues, and progress is in log.txt",
                error.strerror,
            )
