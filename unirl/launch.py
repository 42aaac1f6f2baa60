"""Runs a plan in a run folder: runner, logs, checkpoints, evaluations, and an end in good order."""

from __future__ import annotations

import hashlib
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from unirl.config import to_toml
from unirl.core.evaluator import EvalResult
from unirl.core.learner import Learner, TimedLearner
from unirl.core.seeding import derive_seed
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.report.console import Console, Progress, make_console
from unirl.report.log import log_to_file, notes_on
from unirl.report.sinks import JsonlSink, TensorBoardSink
from unirl.runners import state
from unirl.runners.hooks import (
    CheckpointHook,
    EvalHook,
    LogHook,
    RestartHook,
    RowWriter,
    SamplesHook,
    StopHook,
)
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import Hook, TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.process_settings import keep_freed_memory
from unirl.runners.processes import ProcessesRunner
from unirl.storage import disk
from unirl.storage.checkpoint import Checkpoint, load_checkpoint

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

    Under torchrun all processes train one policy together, each with this plan and environments of
    its own; the first one alone writes. Plans need the inline runner and a learner that takes
    `ranks`.

    resume: a run folder or checkpoint to continue from. console: whether to show progress on
    standard output.
    Ctrl-C or SIGTERM once: the update under way is finished and a checkpoint written. Twice:
    KeyboardInterrupt.
    Raises UniRLError, with the folder as it was, when it holds another run or the plan does not
    fit the checkpoint; and when the disk is full. RankLost, a UniRLError, by the deadline
    queue.timeout_seconds when another process is lost: the first one then writes a checkpoint.
    """
    run_dir, ranks = Path(run_dir), Ranks.from_environment()
    if ranks.world_size > 1:
        plan = _with_ranks(plan, ranks)
    if not ranks.is_main:
        return _follow(plan, resume, ranks)
    with disk.explained(run_dir, f"free some space, then: unirl resume {run_dir}"):
        checkpoint = load_checkpoint(resume) if resume is not None else None
        if checkpoint is not None:
            state.check_fingerprint(plan, checkpoint)
            state.check_ranks(plan, checkpoint, ranks.world_size)
        if checkpoint is None or not _is_of(checkpoint, run_dir):
            _refuse_taken(plan, run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            return _run(plan, run_dir, checkpoint, console, ranks, stack)


def _run(
    plan: Plan,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    console: bool,
    ranks: Ranks,
    stack: ExitStack,
) -> RunResult:
    """The run in a folder that may be written to; `stack` closes what it opens."""
    keep_freed_memory()
    stack.enter_context(log_to_file(run_dir / "log.txt"))
    stack.enter_context(_threads(plan))
    log.info("plan:\n%s", plan.describe())
    stack.enter_context(ranks.joined(plan.queue.timeout_seconds))
    runner = _make_runner(plan, run_dir, ranks)
    stack.callback(runner.close)
    if checkpoint is not None:
        state.restore(runner.loop, checkpoint)
        for loop, folder in _others(runner, run_dir):
            state.restore(loop, load_checkpoint(_of_policy(checkpoint, run_dir, folder)))
    _require_alike(runner.loop, ranks)
    _require_timed(runner.loop)
    cursors = _CursorHook.of(runner.loop, ranks)
    # Not before: a config that does not fit its checkpoint must not replace the one that does.
    if plan.config is not None:
        disk.replace_text(run_dir / "config.toml", to_toml(plan.config, recipe=plan.recipe))
    loop, resumed = runner.loop, checkpoint is not None
    desk = _Desk(plan, loop, run_dir, runner, resumed=resumed, console=console, stack=stack)
    others = [
        _Desk(other.plan, other, folder, runner, resumed=resumed, console=False, stack=stack)
        for other, folder in _others(runner, run_dir)
    ]
    with _stop_on_signals(runner):
        if isinstance(runner, ProcessesRunner):
            runner.run(desk.hooks, *(other.hooks for other in others))
        else:
            runner.run([*cursors, *desk.hooks])
    log.info("ended: %s after %d steps, %.1f s", loop.reason, loop.learner.num_steps, loop.seconds)
    return RunResult(
        loop.learner.num_steps,
        loop.learner.version,
        loop.seconds,
        loop.reason or "",
        desk.save.path,
        desk.evaluate.result if desk.evaluate is not None else None,
        desk.log.scalars,
    )


def _follow(plan: Plan, resume: Path | None, ranks: Ranks) -> RunResult:
    """The run on a rank that writes nothing: rank 0 says when it ends."""
    checkpoint = load_checkpoint(resume) if resume is not None else None
    if checkpoint is not None:
        state.check_ranks(plan, checkpoint, ranks.world_size)
    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(_threads(plan))
        stack.enter_context(ranks.joined(plan.queue.timeout_seconds))
        runner = InlineRunner(plan, rank=ranks.rank, agree=ranks.first_text)
        stack.callback(runner.close)
        loop = runner.loop
        if checkpoint is not None:
            state.restore(loop, state.of_rank(checkpoint, ranks.rank))
        _require_alike(loop, ranks)
        _require_timed(loop)
        cursors = _CursorHook.of(loop, ranks)
        restart_actors = RestartHook(
            plan.run.checkpoint_steps, runner.restart_actors, start_step=loop.learner.num_steps
        )
        with _stop_on_signals(runner):
            runner.run([*cursors, restart_actors])
        learner = loop.learner
        return RunResult(
            learner.num_steps, learner.version, loop.seconds, loop.reason or "", None, None, {}
        )


def _with_ranks(plan: Plan, ranks: Ranks) -> Plan:
    """The plan whose learner learns together with others; UniRLError where it cannot."""
    remedy = "start it once, without torchrun"
    if plan.runner.kind != "inline":
        raise UniRLError(
            f"recipe {plan.recipe} runs in the {plan.runner.kind} runner, in {ranks.world_size} "
            "processes of torchrun",
            "processes that train together need runner.kind inline",
            remedy,
        )
    if "ranks" not in inspect.signature(plan.make_learner).parameters:
        raise UniRLError(
            f"recipe {plan.recipe} was started in {ranks.world_size} processes of torchrun",
            "its learner does not sum over processes: what makes it takes no `ranks`",
            remedy,
        )
    make_learner: Callable[..., Learner] = plan.make_learner
    return replace(plan, make_learner=partial(make_learner, ranks=ranks))


def _require_alike(loop: TrainLoop, ranks: Ranks) -> None:
    """Raise UniRLError unless all ranks begin with the same config, at the same weights."""
    if ranks.world_size == 1:
        return
    plan, digest = loop.plan, hashlib.blake2b()
    for _, value in sorted(loop.learner.weights().items()):
        digest.update(value.cpu().flatten().view(torch.uint8).numpy().tobytes())
    ranks.require_alike(
        config=to_toml(plan.config, recipe=plan.recipe) if plan.config is not None else plan.recipe,
        budget=repr(plan.run.budget),
        steps=f"{loop.learner.version} {loop.learner.num_steps}",
        weights=digest.hexdigest(),
    )


def _require_timed(loop: TrainLoop) -> None:
    """Raise UniRLError where schedules should follow the clock and the learner does not hear it."""
    if loop.plan.run.anneal_over == "seconds" and not isinstance(loop.learner, TimedLearner):
        raise UniRLError(
            "run.anneal_over is seconds",
            f"{type(loop.learner).__name__} has no method record_training_seconds(seconds)",
            "give it that method (unirl.core.learner.TimedLearner), or leave run.anneal_over out",
        )


class _CursorHook:
    """Where the tickets of the other ranks are, told at each update: a checkpoint may have to be
    written when they are gone.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @classmethod
    def of(cls, loop: TrainLoop, ranks: Ranks) -> list[_CursorHook]:
        """First among the hooks of each rank; none where tickets may be lost. Called by all."""
        if ranks.world_size == 1 or not loop.plan.reissue:
            return []
        hook = cls(ranks)
        hook.after_update(loop)  # a run that has nothing left to do is saved too
        return [hook]

    def after_update(self, loop: TrainLoop) -> None:
        """See Hook."""
        loop.other_cursors = self._ranks.share(loop.queue.snapshot().cursor)[1:]

    def at_end(self, loop: TrainLoop) -> None:
        """See Hook."""


class _Desk:
    """What happens between the updates of one policy: everything it leaves lies in `folder`."""

    def __init__(
        self,
        plan: Plan,
        loop: TrainLoop,
        folder: Path,
        runner: InlineRunner | ProcessesRunner,
        *,
        resumed: bool,
        console: bool,
        stack: ExitStack,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        start_step = loop.learner.num_steps
        resume_step = start_step if resumed else None
        sinks = _open_sinks(loop, folder, resume_step, console, stack)
        self.evaluate = _make_eval_hook(plan, folder, start_step)
        self.log = LogHook(sinks, plan.run.log_seconds, self.evaluate)
        self.save = CheckpointHook(
            folder, plan.run.checkpoint_steps, runner.restart_actors, start_step=start_step
        )
        stop = StopHook(plan.run.target_return, plan.run.max_seconds, window=plan.run.target_window)
        samples = SamplesHook(folder, plan.run.log_seconds, resume_step)
        # Evaluated before it is logged: a result is in the row of its step, the last one too.
        hooks: list[Hook | None] = [stop, self.evaluate, self.log, samples, self.save]
        self.hooks = [hook for hook in hooks if hook is not None]


def _others(runner: InlineRunner | ProcessesRunner, run_dir: Path) -> list[tuple[TrainLoop, Path]]:
    """The loops of further policies, each with its folder."""
    others = enumerate(runner.loops[1:], start=1)
    return [(loop, run_dir / "policies" / str(policy)) for policy, loop in others]


def _of_policy(checkpoint: Checkpoint, run_dir: Path, folder: Path) -> Path:
    """Where the checkpoint of a further policy lies, beside that of the first."""
    return checkpoint.path.parent.parent / folder.relative_to(run_dir)


def _is_of(checkpoint: Checkpoint, run_dir: Path) -> bool:
    return checkpoint.path.parent.parent.resolve() == run_dir.resolve()


def _refuse_taken(plan: Plan, run_dir: Path) -> None:
    """Raise UniRLError when the folder holds another run."""
    found = [name for name in ("metrics.jsonl", "checkpoints") if (run_dir / name).exists()]
    config = run_dir / "config.toml"
    own = to_toml(plan.config, recipe=plan.recipe) if plan.config is not None else None
    if config.exists() and config.read_text(encoding="utf-8") != own:
        found.append(config.name)
    if found:
        raise UniRLError(
            f"{run_dir} holds a run already",
            f"a new run needs a folder of its own, and this one has {', '.join(found)}",
            f"resume it (unirl resume {run_dir}), or take another folder",
        )


def _open_sinks(
    loop: TrainLoop, run_dir: Path, resume_step: int | None, console: bool, stack: ExitStack
) -> list[RowWriter]:
    """Where rows of metrics go; `stack` closes them. With a console, notes go there as well."""
    metrics = JsonlSink(run_dir / "metrics.jsonl", resume_step)
    stack.callback(metrics.close)
    events = TensorBoardSink(run_dir / "tb", resume_step)
    stack.callback(events.close)
    rows: list[RowWriter] = [metrics, events]
    if console:
        end = loop.plan.run
        progress = Progress(end.total_steps, end.max_seconds)
        screen = make_console(run_dir.name, progress, run_dir)
        stack.callback(screen.close)
        stack.enter_context(notes_on(screen))
        rows.append(_ConsoleRows(screen))
    return rows


def _make_runner(plan: Plan, run_dir: Path, ranks: Ranks) -> InlineRunner | ProcessesRunner:
    if plan.runner.kind == "inline":
        return InlineRunner(plan, agree=None if ranks.world_size == 1 else ranks.first_text)
    return ProcessesRunner(plan, log_dir=run_dir / "logs")


def _make_eval_hook(plan: Plan, run_dir: Path, start_step: int) -> EvalHook | None:
    if plan.run.eval_steps == 0 or plan.make_evaluator is None:
        return None
    return EvalHook(
        partial(plan.make_evaluator, derive_seed(plan.run.seed, "evaluation")),
        run_dir,
        every_steps=plan.run.eval_steps,
        num_episodes=plan.run.eval_episodes,
        deterministic=plan.run.eval_deterministic,
        start_step=start_step,
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
def _stop_on_signals(runner: InlineRunner | ProcessesRunner) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run in good order, the second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    num_signals = 0

    def stop(number: int, frame: object) -> None:
        # Counted: a loop that has ended for another reason may still be writing its checkpoint.
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            raise KeyboardInterrupt
        for loop in runner.loops:
            loop.stop("interrupted")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
