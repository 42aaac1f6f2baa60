"""Where a run begins: in an empty folder, or from a checkpoint that fits its plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from unirl.config import to_toml
from unirl.core.learner import TimedLearner
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.runners import state
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.storage.checkpoint import Checkpoint, load_checkpoint


def open_checkpoint(plan: Plan, where: Path | None, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint to continue from; UniRLError where it is of another plan."""
    if where is None:
        return None
    checkpoint = load_checkpoint(where)
    state.check_fingerprint(plan, plan.learner, checkpoint)
    state.check_ranks(plan.learner, checkpoint, ranks.world_size)
    return checkpoint


def learner_folder(run_dir: Path, index: int) -> Path:
    """Where a learner's outputs are: the first one's are the run's."""
    return run_dir / "policies" / str(index) if index else run_dir


def restore(loops: Sequence[TrainLoop], checkpoint: Checkpoint | None, ranks: Ranks) -> None:
    """Put a checkpoint back into loops that have not started, and check that they can begin."""
    for index, loop in enumerate(loops):
        if checkpoint is not None:
            found = checkpoint if ranks.is_main else state.of_rank(checkpoint, ranks.rank)
            if index:  # beside that of the first
                run_dir = checkpoint.path.parent.parent
                found = load_checkpoint(learner_folder(run_dir, index))
            state.restore(loop, found)
        _require_timed(loop)


def open_ledgers(loops: Sequence[TrainLoop], run_dir: Path, stack: ExitStack) -> None:
    """Give loops that were restored their ledgers, without what later updates had learned from.
    stack: closes them.
    """
    for loop in loops:
        make = loop.learner_plan.make_ledger
        ledger = make(run_dir) if make is not None else None
        if ledger is not None:
            stack.callback(ledger.close)
            ledger.released_after(loop.learner.version)
            loop.ledger = ledger


def _require_timed(loop: TrainLoop) -> None:
    """UniRLError where schedules follow the clock and the learner cannot know the time."""
    if loop.plan.run.anneal_over == "seconds" and not isinstance(loop.learner, TimedLearner):
        raise UniRLError(
            "run.anneal_over is seconds",
            f"{type(loop.learner).__name__} has no method record_training_seconds(seconds)",
            "give it that method (unirl.core.learner.TimedLearner), or leave run.anneal_over out",
        )


def check_folder(plan: Plan, run_dir: Path, checkpoint: Checkpoint | None) -> None:
    """Raise UniRLError when the folder holds another run than the one that is continued."""
    if checkpoint is not None and checkpoint.path.parent.parent.resolve() == run_dir.resolve():
        return
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
