"""Runs a plan in a run folder."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.config import to_toml
from unirl.core.evaluator import EvalResult
from unirl.descendants import descendants_ended
from unirl.errors import RunLost, UniRLError
from unirl.launch.callbacks import Callback, Callbacks, Training
from unirl.launch.outputs import RunOutputs
from unirl.launch.ranks.start import started_ranks
from unirl.launch.resume import (
    check_folder,
    learner_folder,
    open_checkpoint,
    open_ledgers,
    restore,
)
from unirl.launch.scaling import ScaleHook
from unirl.launch.several_ranks import cursor_hooks, plan_for_ranks, require_alike
from unirl.learners.parallel import Ranks
from unirl.report.alerts import Alerts
from unirl.report.log import log_to_file
from unirl.report.output import lasting_output
from unirl.report.trackers.tracking import check_trackers
from unirl.run_events import event
from unirl.runners.hooks import CheckpointHook
from unirl.runners.loop import TrainLoop
from unirl.runners.make import learner_threads, make_cluster, make_runner
from unirl.runners.plan import Plan
from unirl.storage import disk
from unirl.storage.checkpoint import Checkpoint
from unirl.storage.run_lock import locked
from unirl.supervision.process_settings import keep_freed_memory
from unirl.supervision.temp_folders import claim_torchrun, sweep

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
    """total_steps, pause_steps, target_return, max_seconds, samples (all were learned from),
    interrupted, or what a callback said.
    """
    checkpoint: Path | None
    """The newest checkpoint."""
    last_eval: EvalResult | None
    """The newest evaluation while training."""
    scalars: dict[str, float]
    """The last row of metrics."""


def run(
    plan: Plan,
    run_dir: Path | str,
    *,
    resume: Path | str | None = None,
    console: bool = True,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train a plan until it ends; everything it leaves is in `run_dir`.

    Under torchrun all processes train one policy together, each with this plan and environments of
    its own; the first one alone writes. Plans need the inline runner and a learner that takes
    `ranks`.

    resume: a run folder or checkpoint to continue from. console: whether to show progress on
    standard output. callbacks: called after every update and at the end, before those of
    run.callbacks; under torchrun by the first process alone.
    Ctrl-C, SIGTERM or a closed terminal (SIGHUP, unless it is ignored: nohup) once: the current
    update is finished and a checkpoint written. Ctrl-C or SIGTERM twice: KeyboardInterrupt.
    SIGQUIT ends all at once.
    Raises UniRLError, with the folder as it was, when it holds another run, when a run writes to it
    now, or when the plan does not fit the checkpoint; and when the disk is full. RankLost, a
    UniRLError, by the deadline queue.timeout_seconds when another process is lost: the first one
    then writes a checkpoint. RunLost when what it stands on was lost more than
    run.max_run_restarts times.
    """
    run_dir, is_main = Path(run_dir), Ranks.from_environment().is_main
    if is_main:
        check_trackers(plan.run.track)
    with disk.explained(run_dir, "free some space, then start it again"):
        lock = locked(run_dir) if is_main else nullcontext()
        with lock:
            resume = None if resume is None else Path(resume)
            return run_in_folder(plan, run_dir, resume, console=console, callbacks=callbacks)


def run_in_folder(
    plan: Plan,
    run_dir: Path,
    resume: Path | None,
    *,
    console: bool,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """As `run`, in a folder whose lock this process holds, or the first of its ranks."""
    ranks = Ranks.from_environment()
    plan = plan_for_ranks(plan, ranks)
    with disk.explained(run_dir, f"free some space, then: unirl resume {run_dir}"):
        checkpoint = open_checkpoint(plan, resume, ranks)
        if not ranks.is_main:
            return _train(plan, None, checkpoint, ranks, Callbacks(()), console=False)
        called = Callbacks(callbacks, plan.run.callbacks)
        check_folder(plan, run_dir, checkpoint)
        return _train(plan, run_dir, checkpoint, ranks, called, console=console)


def _train(
    plan: Plan,
    run_dir: Path | None,
    checkpoint: Checkpoint | None,
    ranks: Ranks,
    callbacks: Callbacks,
    *,
    console: bool,
) -> RunResult:
    """run_dir: None on a rank that writes nothing."""
    # First: a URL that nothing can be sent to ends the run before it starts.
    alerts = Alerts(plan.run, run_dir.name) if run_dir is not None else None
    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(lasting_output())
        stack.enter_context(descendants_ended())
        claim_torchrun()
        if run_dir is not None:
            sweep()
            stack.enter_context(log_to_file(run_dir / "log.txt"))
            if alerts is not None:
                stack.enter_context(alerts)
            log.info("plan:\n%s", plan.describe())
        try:
            return _train_until_done(
                plan, run_dir, checkpoint, ranks, alerts, callbacks, console=console
            )
        except Exception as error:
            cause = error.what if isinstance(error, UniRLError) else f"{error}"
            about = event("gave_up", member="run", cause=f"{type(error).__name__}: {cause}")
            log.error("the run gave up: %s: %s", type(error).__name__, error, extra=about)
            raise


def _train_until_done(
    plan: Plan,
    run_dir: Path | None,
    checkpoint: Checkpoint | None,
    ranks: Ranks,
    alerts: Alerts | None,
    callbacks: Callbacks,
    *,
    console: bool,
) -> RunResult:
    """Start again, from the checkpoint written then, where what the run stands on was lost."""
    limit, again = plan.run.max_run_restarts, 0
    while True:
        try:
            return _train_once(
                plan, run_dir, checkpoint, ranks, alerts, callbacks, again, console=console
            )
        except RunLost as error:
            if run_dir is None or again >= limit:
                raise
            again += 1
            about = event("restarted", member="run", cause=error.what, number=again)
            text = "the run starts again from its checkpoint (%d of %d, run.max_run_restarts): %s"
            log.warning(text, again, limit, error, extra=about)
        if (run_dir / "checkpoints" / "latest").exists():
            checkpoint = open_checkpoint(plan, run_dir, ranks)


def _train_once(
    plan: Plan,
    run_dir: Path | None,
    checkpoint: Checkpoint | None,
    ranks: Ranks,
    alerts: Alerts | None,
    callbacks: Callbacks,
    again: int,
    *,
    console: bool,
) -> RunResult:
    """again: how often it was started before."""
    with ExitStack() as stack:
        stack.enter_context(learner_threads(plan.runner))
        stack.enter_context(ranks.joined(plan.learner.queue.timeout_seconds))
        log_dir = run_dir / "logs" if run_dir is not None else None
        if run_dir is not None:
            plan = plan.in_folder(run_dir.resolve())
        cluster = None
        if plan.runner.kind == "ray":
            cluster = make_cluster(plan, is_again=again > 0)
            stack.callback(cluster.close)
        plan = stack.enter_context(started_ranks(plan, checkpoint, log_dir, cluster))
        agree = ranks.first_text if ranks.world_size > 1 else None
        runner = make_runner(
            plan,
            log_dir=log_dir,
            rank=ranks.rank,
            agree=agree,
            cluster=cluster.share() if cluster is not None else None,
        )
        stack.callback(runner.close)
        restore(runner.loops, checkpoint, ranks)
        loop = runner.loops[0]
        require_alike(loop, ranks)
        hooks = [cursor_hooks(loop, ranks), *([] for _ in runner.loops[1:])]
        outputs: list[RunOutputs] = []
        trainings: list[Training] = []
        if run_dir is None:
            every, step = plan.run.checkpoint_steps, loop.learner.num_steps
            hooks[0].append(CheckpointHook(None, every, runner.restart_actors, start_step=step))
        else:
            # Not before: a config that does not fit its checkpoint must not replace the one that
            # does.
            if plan.config is not None:
                disk.replace_text(run_dir / "config.toml", to_toml(plan.config, recipe=plan.recipe))
            open_ledgers(runner.loops, run_dir.resolve(), stack)
            hooks[0].append(ScaleHook(run_dir, plan, runner.resize))
            folders = [learner_folder(run_dir, index) for index in range(len(runner.loops))]
            if plan.make_hooks is not None:
                # Before a checkpoint, which then holds what they have done.
                for own, hook in zip(hooks, plan.make_hooks(runner.loops, folders), strict=True):
                    own.append(hook)
            for index, (own, each) in enumerate(zip(hooks, runner.loops, strict=True)):
                output = RunOutputs(
                    each,
                    run_dir,
                    index,
                    runner.restart_actors,
                    resumed=checkpoint is not None,
                    console=None if index else console,
                    stack=stack,
                    leader=outputs[0] if index else None,
                )
                outputs.append(output)
                trainings.append(Training(each, output, run_dir))
                output.before_log(callbacks.hook(trainings[-1]))
                own += output.hooks
        if alerts is not None:
            alerts.rows = outputs[0].log
            hooks[0].append(alerts)
        kind, start = "started" if checkpoint is None else "resumed", loop.learner.num_steps
        facts = {"recipe": plan.recipe, "runner": plan.runner.kind, **plan.outline()}
        about = event(kind, member="run", step=start, **facts)
        log.info("training begins at step %d", start, extra=about)
        with _stop_on_signals(runner.loops):
            runner.run(*hooks)
        callbacks.at_end(trainings)
        return _result(loop, outputs[0] if outputs else None)


def _result(loop: TrainLoop, outputs: RunOutputs | None) -> RunResult:
    steps, seconds = loop.learner.num_steps, loop.seconds
    about = event("ended", member="run", step=steps, cause=loop.reason)
    log.info("ended: %s after %d steps, %.1f s", loop.reason, steps, seconds, extra=about)
    ended = (steps, loop.learner.version, seconds, loop.reason or "")
    if outputs is None:
        return RunResult(*ended, None, None, {})
    last_eval = outputs.evaluate.result if outputs.evaluate is not None else None
    return RunResult(*ended, outputs.save.path, last_eval, outputs.log.scalars)


@contextmanager
def _stop_on_signals(loops: Sequence[TrainLoop]) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP ends the run in good order; a second SIGINT or SIGTERM at
    once; SIGQUIT even where the interpreter is stuck.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    num_signals = 0

    def stop(number: int, frame: object) -> None:
        # Counted: a loop that has ended for another reason may still be writing its checkpoint.
        # A terminal that closes is not impatient: it hangs up twice (shell and kernel), and an end
        # of the session sends SIGTERM too.
        nonlocal num_signals
        num_signals += number != signal.SIGHUP
        if num_signals > 1:
            raise KeyboardInterrupt
        for loop in loops:
            loop.stop("interrupted")

    handlers: dict[signal.Signals, Any] = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = stop
    # A shell without job control starts what is in its background with SIGQUIT ignored.
    handlers[signal.SIGQUIT] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
