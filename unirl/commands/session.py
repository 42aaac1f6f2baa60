"""One session of training: the command on record, the run, and how to continue."""

from __future__ import annotations

import contextlib
import json
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.commands.run_folder import mark_failed
from unirl.config.secrets import redacted
from unirl.errors import UniRLError
from unirl.imports import large_imports
from unirl.storage import disk

if TYPE_CHECKING:
    from unirl.launch import RunResult
    from unirl.runners.plan import Plan


class Crash(Exception):
    """An unexpected error whose trace is in `log` already; the cause is chained."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.log = log


def start(
    plan: Plan,
    run_dir: Path,
    command: Sequence[str],
    console: bool,
    resume_from: Path | None = None,
) -> int:
    """Run a plan whose folder is locked and checked: from here on, command.txt records the command.

    Under torchrun only the first process writes and prints; the others train along.
    """
    with large_imports():
        from unirl.launch.run import run_in_folder
    from unirl.supervision.process_settings import name_process

    name_process("unirl learner")
    if not is_main_process():
        run_in_folder(plan, run_dir, resume_from, console=False)
        return 0
    record = run_dir / "command.txt"
    with disk.explained(record, "free some space, then start it again"), record.open("a") as file:
        file.write(shlex.join(["unirl", *_without_secrets(command, plan.run.alerts)]) + "\n")
    try:
        result = run_in_folder(plan, run_dir, resume_from, console=console)
    except UniRLError as error:
        mark_failed(run_dir, error)
        raise
    except Exception as error:
        mark_failed(run_dir, error)
        with contextlib.suppress(OSError), (run_dir / "log.txt").open("a") as file:
            traceback.print_exception(error, file=file)
        raise Crash(run_dir / "log.txt") from error
    _print_end(plan, run_dir, result)
    return 0


def _without_secrets(command: Sequence[str], alerts: Sequence[str]) -> list[str]:
    """The words of a command, without the URLs that alerts are sent to."""
    words, flag = list(command), "--run.alerts"
    for index, word in enumerate(words):
        if word.startswith(f"{flag}="):
            words[index] = f"{flag}={json.dumps(redacted(alerts))}"
        elif index and words[index - 1] == flag:
            words[index] = json.dumps(redacted(alerts))
    return words


def is_main_process() -> bool:
    """Whether this process writes the run folder: of those that torchrun starts only the first."""
    from unirl.learners.parallel import Ranks

    return Ranks.from_environment().is_main


def _print_end(plan: Plan, run_dir: Path, result: RunResult) -> None:
    from unirl.population.hook import best_folder

    rate = result.num_steps / result.seconds if result.seconds else 0.0
    print(
        f"{run_dir}: {result.reason} after {result.num_steps:,} steps in {result.seconds:.1f} s"
        f" ({rate:,.0f} steps/s, {result.version:,} updates)"
    )
    if result.reason in ("interrupted", "pause_steps"):
        further = " --run.pause-steps none" * (result.reason == "pause_steps")
        print(f"continue with:  unirl resume {shlex.quote(str(run_dir))}{further}")
    elif (best := best_folder(run_dir)) is not None:
        print(f"best of the population, for eval and play too:  {shlex.quote(str(best))}")
    elif plan.learner.make_evaluator is None:
        print(f"next:  unirl plot {shlex.quote(str(run_dir))}  (or card)")
    else:
        print(f"next:  unirl eval {shlex.quote(str(run_dir))}  (or play, plot, card)")
