"""`unirl train`: recipe, then config files in order, then flags."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl import registry
from unirl.commands import run_folder
from unirl.commands.arguments import parse_with_recipe
from unirl.commands.session import is_main_process, start
from unirl.commands.shipped import config_file
from unirl.errors import UniRLError

if TYPE_CHECKING:
    from unirl.runners.plan import Plan


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
    """Resolve the config, what comes later wins, and train it in a folder of its own."""
    name, files = recipe_and_files(arguments)
    tables = {path: configs.load_toml(path) for path in files}
    name = _take_recipe(name, tables)
    run_names = [str(table.pop("name")) for table in tables.values() if "name" in table]
    module = registry.recipe(name)
    for path, table in tables.items():
        configs.check_keys(module.Config, table, f"in {path}")
    positional, options, changes = parse_with_recipe(arguments, TrainOptions, module.Config)
    _refuse_surplus(positional, name)
    if options.target is not None:
        changes["run.target_return"] = options.target
    config: Any = configs.from_mapping(
        module.Config, configs.merge(*tables.values(), configs.nest(module.Config, changes))
    )
    plan: Plan = module.plan(config)
    is_main = is_main_process()
    if options.dry_run:
        if is_main:
            print(configs.to_toml(config if plan.config is None else plan.config, recipe=name))
            print(textwrap.indent(plan.describe(), "# "))
        return 0
    folder = options.name or (run_names[-1] if run_names else _default_name(name, config))
    run_dir = options.runs_dir / folder
    if is_main:
        run_folder.claim(run_dir, options.overwrite)
        if options.console and plan.notes:
            print("\n".join(plan.notes))
    return start(plan, run_dir, ["train", *arguments], options.console)


def recipe_and_files(arguments: Sequence[str]) -> tuple[str | None, list[Path]]:
    """The recipe's name and the @files, before the recipe's own flags can be understood."""
    help_by_flag = {configs.flag_of(item.key): item for item in configs.fields_help(TrainOptions)}
    name: str | None = None
    files: list[Path] = []
    previous = ""
    for word in arguments:
        if word.startswith("@"):
            files.append(config_file(word[1:]))
        elif not word.startswith("-") and name is None:
            flag = help_by_flag.get(previous.replace("--no-", "--"))
            takes_value = previous.startswith("--") and "=" not in previous
            if not takes_value or (flag is not None and flag.is_switch):
                name = word
        previous = word
    return name, files


def _take_recipe(name: str | None, tables: Mapping[Path, dict[str, Any]]) -> str:
    """Take the key recipe out of the tables; all that name one must agree."""
    named = {path: str(table.pop("recipe")) for path, table in tables.items() if "recipe" in table}
    for path, other in named.items():
        if name is not None and other != name:
            raise UniRLError(
                f'"{path}" is for another recipe',
                f'it says recipe = "{other}", the recipe asked for is "{name}"',
                f"leave {name} out, or take another config file",
            )
        name = other
    if name is None:
        raise UniRLError(
            "no recipe was given",
            "it is the first argument, or the key recipe of a config file",
            "try unirl train impala, and see unirl list recipes",
        )
    return name


def _refuse_surplus(positional: Sequence[str], recipe: str) -> None:
    surplus = [word for word in positional if word != recipe and not word.startswith("@")]
    if surplus:
        raise UniRLError(
            f'"{surplus[0]}" is one argument too many',
            "train takes one recipe, @files and --key value",
            f"{surplus[0]} as a config file is @{surplus[0]}"
            if surplus[0].endswith(".toml")
            else "see unirl train --help",
        )


def _default_name(recipe: str, config: Any) -> str:
    env_id = str(getattr(getattr(config, "env", None), "id", "")).lower()
    words = "".join(letter if letter.isalnum() else "-" for letter in env_id).strip("-")
    stem = recipe.rpartition(".")[2]
    return "-".join(part for part in (stem, words, time.strftime("%Y%m%d-%H%M%S")) if part)
