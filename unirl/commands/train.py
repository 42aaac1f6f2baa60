"""`unirl train`: recipe, then config files in order, then flags."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from unirl import config as configs
from unirl.commands import run_folder
from unirl.commands.arguments import Chosen, choose, env_id_of
from unirl.commands.session import is_main_process, start
from unirl.report.trackers.tracking import check_trackers


@dataclass(frozen=True)
class TrainOptions:
    """Flags of `unirl train` besides the recipe's own."""

    name: str | None = None
    """Name of the run folder. None: the config file's name, or recipe, environment and time."""
    runs_dir: Path = Path("runs")
    """Where run folders are."""
    overwrite: bool = False
    """Delete a run folder of this name first."""
    dry_run: bool = False
    """Print the resolved config and the plan, and start nothing."""
    target: float | None = None
    """Stop at this mean return of recent episodes; short for --run.target-return."""
    console: bool = True
    """Show progress. --no-console: print nothing until the end."""


def train(arguments: Sequence[str]) -> int:
    """Resolve the config and train it in a folder of its own."""
    chosen, options = choose(arguments, TrainOptions, "train")
    if options.target is not None:
        changed = configs.override(chosen.config, {"run.target_return": options.target})
        chosen = replace(chosen, config=changed)
    plan = chosen.plan()
    if plan.run.callbacks:
        from unirl.launch.callbacks import check_callbacks

        check_callbacks(plan.run.callbacks)
    if plan.run.alerts:
        from unirl.report.alerts import receivers

        receivers(plan.run.alerts)  # before --overwrite deletes anything
    is_main = is_main_process()
    if is_main and not options.dry_run:
        check_trackers(plan.run.track)
    names = (options.name, chosen.name, _default_name(chosen))
    run_dir = run_folder.in_runs_dir(options.runs_dir, next(n for n in names if n is not None))
    if options.dry_run:
        if is_main:
            config = chosen.config if plan.config is None else plan.config
            print(configs.to_toml(config, recipe=chosen.recipe))
            print(textwrap.indent(plan.describe(), "# "))
        return 0
    with run_folder.held(run_dir) if is_main else nullcontext():
        if is_main:
            run_folder.make_room(run_dir, options.overwrite)
            if options.console and plan.notes:
                print("\n".join(plan.notes))
        return start(plan, run_dir, ["train", *arguments], options.console)


def _default_name(chosen: Chosen) -> str:
    env_id = (env_id_of(chosen.config) or "").lower()
    words = "".join(letter if letter.isalnum() else "-" for letter in env_id).strip("-")
    stem = chosen.recipe.rpartition(".")[2]
    return "-".join(part for part in (stem, words, time.strftime("%Y%m%d-%H%M%S")) if part)
