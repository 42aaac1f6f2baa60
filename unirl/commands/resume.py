"""`unirl resume`: go on from the newest checkpoint, with changed keys if wanted; source: none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl.commands import run_folder
from unirl.commands.arguments import first, one_run, split
from unirl.commands.session import start

if TYPE_CHECKING:
    from unirl.runners.plan import Plan


@dataclass(frozen=True)
class ResumeOptions:
    """Flags of `unirl resume` besides the recipe's own."""

    console: bool = True
    """Show progress. --no-console: print nothing until the end."""


def resume(arguments: Sequence[str]) -> int:
    """Train on in the run's folder; flags change its config."""
    run_dir = run_folder.find(first(arguments, "resume"))
    module, table = run_folder.read_config(run_dir)
    positional, flags = configs.parse_flags(arguments, ResumeOptions, module.Config)
    one_run(positional, "resume")
    own, changes = split(flags, ResumeOptions)
    options = configs.from_mapping(ResumeOptions, own)
    config: Any = configs.from_mapping(
        module.Config, configs.merge(table, configs.nest(module.Config, changes))
    )
    plan: Plan = module.plan(config)
    _refuse_another_checkpoint(plan, run_dir)
    return start(plan, run_dir, ["resume", *arguments], options.console, resume_from=run_dir)


def _refuse_another_checkpoint(plan: Plan, run_dir: Path) -> None:
    # The run itself checks this too, but then the command would be on record as one that started.
    from unirl.core.checkpoint import load_checkpoint
    from unirl.runners.state import check_fingerprint

    check_fingerprint(plan, load_checkpoint(run_dir))
