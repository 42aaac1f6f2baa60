"""Arguments of a command: its own flags, and the recipe or the run that it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from unirl import config as configs
from unirl import registry
from unirl.config.shipped import config_file
from unirl.errors import UniRLError
from unirl.imports import keep_imported, large_imports
from unirl.supervision.fork_server import fork_now

if TYPE_CHECKING:
    from unirl.envs.answers import Answers
    from unirl.recipes.env_kind import EnvKind
    from unirl.runners.plan import Plan

T = TypeVar("T")


def parse(
    arguments: Sequence[str],
    options: type[T],
    short: Mapping[str, str] | None = None,
    alone: Mapping[str, str] | None = None,
) -> tuple[list[str], T]:
    """Positional arguments and flags of a command that has no recipe's flags besides its own."""
    positional, flags = configs.parse_flags(arguments, options, short=short, alone=alone)
    return positional, configs.from_mapping(options, configs.nest(options, flags))


def parse_with_recipe(
    arguments: Sequence[str], options: type[T], recipe: type
) -> tuple[list[str], T, dict[str, Any]]:
    """Positional arguments, the command's own options, and the recipe's flags by dotted key."""
    positional, flags = configs.parse_flags(arguments, options, recipe)
    own = {item.key for item in configs.fields_help(options)}
    changes = {key: value for key, value in flags.items() if key not in own}
    mine = {key: value for key, value in flags.items() if key in own}
    return positional, configs.from_mapping(options, configs.nest(options, mine)), changes


@dataclass(frozen=True)
class Chosen:
    """A recipe with its config, as a command line gave it."""

    name: str | None
    """The run's name in the config file."""
    recipe: str
    module: ModuleType
    config: Any
    notes: tuple[str, ...] = ()
    """Defaults that the environment's kind gave, and why."""
    kind: EnvKind | None = None
    """What they depend on."""
    answers: Answers = field(default_factory=dict)
    """What its environments said when they were asked for it."""

    @property
    def title(self) -> str:
        return self.name or self.recipe

    def plan(self) -> Plan:
        """The plan; nothing is started."""
        from unirl.envs.answers import answers_kept

        with answers_kept(self.answers):
            plan: Plan = self.module.plan(self.config)
        return replace(plan, notes=(*self.notes, *plan.notes))


def choose(arguments: Sequence[str], options: type[T], command: str) -> tuple[Chosen, T]:
    """What the arguments of a command choose: recipe, then config files in order, then flags; what
    comes later wins.

    options: the command's own flags.
    """
    recipe, files = recipe_and_files(arguments, options)
    tables = {path: configs.load_toml(path) for path in files}
    for path, table in tables.items():
        named = str(table.pop("recipe", recipe or ""))
        if recipe is not None and named != recipe:
            raise UniRLError(
                f'"{path}" is for another recipe',
                f'it says recipe = "{named}", the recipe asked for is "{recipe}"',
                f"leave {recipe} out, or take another config file",
            )
        recipe = named or None
    if recipe is None:
        raise UniRLError(
            "no recipe was given",
            f"unirl {command} takes a recipe, or a config file that names one",
            f"try unirl {command} @pong, and see unirl list configs",
        )
    names = [str(table.pop("name")) for table in tables.values() if "name" in table]
    module = recipe_to_train(recipe)
    for path, table in tables.items():
        configs.check_keys(module.Config, table, f"in {path}")
    positional, own, changes = parse_with_recipe(arguments, options, module.Config)
    surplus = [word for word in positional if word != recipe and not word.startswith("@")]
    if surplus:
        raise UniRLError(
            f'"{surplus[0]}" is one argument too many',
            f"{command} takes one recipe, @files and --key value",
            f"{surplus[0]} as a config file is @{surplus[0]}"
            if surplus[0].endswith(".toml")
            else f"see unirl {command} --help",
        )
    table = configs.merge(*tables.values(), configs.nest(module.Config, changes))
    return settled(names[-1] if names else None, recipe, module, table, {}), own


def settled(
    name: str | None, recipe: str, module: ModuleType, table: Mapping[str, Any], answers: Answers
) -> Chosen:
    """A recipe with the config that nested tables describe, and what they leave out chosen by the
    environment's kind.

    answers: what environments have said; what they are asked now is added.
    """
    from unirl.envs.answers import answers_kept
    from unirl.recipes.defaults import settle

    with answers_kept(answers):
        found = settle(module, configs.from_mapping(module.Config, table), table)
    return Chosen(name, recipe, module, found.config, found.lines, found.kind, answers)


def recipe_to_train(name: str) -> ModuleType:
    """Import a recipe, and let processes of its runs be forks of this one."""
    with large_imports():
        module = registry.recipe(name)
    keep_imported()
    # Importing a recipe of one's own may have started anything.
    if name in registry.RECIPES and not getattr(module, "IMPORTS_LATE", False):
        fork_now()
    return module


def recipe_and_files(arguments: Sequence[str], options: type) -> tuple[str | None, list[Path]]:
    """The recipe's name and the @files, before the recipe's own flags can be understood."""
    switches = {configs.flag_of(o.key) for o in configs.fields_help(options) if o.is_switch}
    name: str | None = None
    files: list[Path] = []
    previous = ""
    for word in arguments:
        if word.startswith("@"):
            files.append(config_file(word[1:]))
        elif not word.startswith("-") and name is None:
            takes_value = previous.startswith("--") and "=" not in previous
            if not takes_value or previous.replace("--no-", "--") in switches:
                name = word
        previous = word
    return name, files


def env_id_of(config: Any) -> str | None:
    env_id = getattr(getattr(config, "env", None), "id", None)
    return env_id if isinstance(env_id, str) else None


def first(arguments: Sequence[str], command: str) -> str:
    """The run of a command whose flags cannot be understood before it is read."""
    if not arguments or arguments[0].startswith("-"):
        raise missing_run(command)
    return arguments[0]


def one_run(positional: Sequence[str], command: str) -> str:
    if not positional:
        raise missing_run(command)
    if len(positional) > 1:
        raise UniRLError(
            f'"{positional[1]}" is one argument too many',
            f"unirl {command} takes one run",
            f"call it once per run, or see unirl {command} --help",
        )
    return positional[0]


def run_and_target(
    positional: Sequence[str], command: str, target: str, example: str
) -> tuple[str, str]:
    """A run, and where what is made of it goes."""
    if not positional:
        raise missing_run(command)
    if len(positional) != 2:
        raise UniRLError(
            f"unirl {command} was given {' '.join(positional)}",
            f"it takes a run, or one of its checkpoints, and {target} to write to",
            f"unirl {command} {positional[0]} {example}",
        )
    return positional[0], positional[1]


def missing_run(command: str) -> UniRLError:
    return UniRLError(
        "no run was given",
        f"unirl {command} takes a run folder first",
        f"try unirl {command} runs/NAME",
    )
