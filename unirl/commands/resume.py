"""`unirl resume`: continue from a checkpoint, with changed keys if wanted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.commands import run_folder
from unirl.commands.arguments import first, one_run, parse_with_recipe, recipe_to_train
from unirl.commands.session import is_main_process, start
from unirl.commands.sweep import sweep
from unirl.commands.sweep_request import folder_of
from unirl.errors import UniRLError
from unirl.report.trackers.tracking import check_trackers

if TYPE_CHECKING:
    from unirl.runners.plan import Plan
    from unirl.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class ResumeOptions:
    """Flags of `unirl resume` besides the recipe's own."""

    console: bool = True
    """Show progress. --no-console: print nothing until the end."""


def resume(arguments: Sequence[str]) -> int:
    """Train on in the run's folder, from its newest checkpoint or the one that was named; flags
    change its config. A sweep is continued as a whole.
    """
    if folder_of(first(arguments, "resume")) is not None:
        return sweep(arguments)
    where = run_folder.find(first(arguments, "resume"))
    run_dir = run_folder.folder_of(where)
    module, _ = run_folder.read_config(run_dir, recipe_to_train)
    positional, options, changes = parse_with_recipe(arguments, ResumeOptions, module.Config)
    one_run(positional, "resume")
    # Before the checkpoint is read: a run that still trains would delete it.
    with run_folder.held(run_dir) if is_main_process() else nullcontext():
        plan, checkpoint = run_folder.load(where, changes)
        _check_checkpoint(plan, checkpoint, where)
        if is_main_process():
            check_trackers(plan.run.track)
        return start(plan, run_dir, ["resume", *arguments], options.console, resume_from=where)


def _check_checkpoint(plan: Plan, checkpoint: Checkpoint, where: Path) -> None:
    """Raise UniRLError unless the plan can continue from it: the run would do so only after the
    command is on record as one that started.
    """
    from unirl.runners.state import check_fingerprint

    check_fingerprint(plan, plan.learner, checkpoint)
    num_steps, total_steps = int(checkpoint.state["num_steps"]), plan.run.total_steps
    if num_steps >= total_steps:
        raise UniRLError(
            f"{where} is done already: {num_steps} of {total_steps} steps",
            "run.total_steps > the steps of the checkpoint must hold for training to continue",
            f"raise it: unirl resume {shlex.quote(str(where))} --run.total-steps {2 * num_steps}",
        )
    pause_steps = plan.run.pause_steps
    if pause_steps is not None and num_steps >= pause_steps:
        raise UniRLError(
            f"{where} has reached its pause: {num_steps} of {pause_steps} steps",
            "run.pause_steps > the steps of the checkpoint must hold for training to continue",
            f"train to the end: unirl resume {shlex.quote(str(where))} --run.pause-steps none",
        )
    seconds, max_seconds = float(checkpoint.state["seconds"]), plan.run.max_seconds
    if max_seconds is not None and seconds >= max_seconds:
        raise UniRLError(
            f"{where} has used its time: {seconds:.0f} of {max_seconds:g} seconds",
            "run.max_seconds > the seconds of the checkpoint must hold for training to continue",
            f"raise it: unirl resume {shlex.quote(str(where))} --run.max-seconds {2 * seconds:.0f}",
        )
