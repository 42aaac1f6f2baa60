"""What `unirl sweep` is asked for: by a file, or the folder of one that began, and by flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl import registry
from unirl.commands.arguments import settled
from unirl.config.secrets import redacted
from unirl.config.shipped import config_file
from unirl.config.writing import value_to_toml
from unirl.errors import UniRLError
from unirl.imports import large_imports
from unirl.search_space import SearchSpace, read_space
from unirl.sweep import methods, record
from unirl.sweep.config import SweepConfig, SweepOptions

if TYPE_CHECKING:
    from unirl.commands.arguments import Chosen
    from unirl.envs.answers import Answers

_OWN: Mapping[str, str] = MappingProxyType(
    {
        "run.seed": "name them as the sweep's own: seeds = [1, 2, 3]",
        "run.pause_steps": "leave it out, or say halving.first_steps",
        "run.total_steps": "leave it out, or leave halving.first_steps out",
    }
)
"""What a sweep sets by itself, and what is said instead; the last with halving alone."""
_FILE_KEYS = tuple(item.name for item in dataclasses.fields(SweepConfig))
_NOT_ASKED = ("base", "name", "jobs", "max_seconds")
"""Settings of a sweep that are not remembered, and may be others when it continues."""


@dataclass(frozen=True)
class Asked:
    """What file and flags ask for."""

    options: SweepOptions
    space: SearchSpace
    recipe: str
    module: ModuleType
    table: Mapping[str, Any]
    """Of the runs' config, without what is tried."""
    default_name: str
    answers: Answers

    def resolve(self, settings: Mapping[str, Any]) -> Chosen:
        """The config with these settings, as `unirl train` would have it; every rule checked."""
        table = configs.merge(self.table, configs.nest(self.module.Config, settings))
        chosen = settled(None, self.recipe, self.module, table, self.answers)
        chosen.plan()
        return chosen

    def check_all(self, propose: methods.Propose, num_trials: int) -> None:
        """Raise UniRLError where a trial is not allowed: of Optuna's, where an end of a range is
        not.
        """
        if self.options.method == "optuna":
            every = methods.corners(self.space)
        else:
            every = [propose(number, ()) for number in range(num_trials)]
        for settings in every:
            try:
                self.resolve(settings)
            except UniRLError as error:
                raise UniRLError(
                    f"{_words(settings)} is not allowed: {error.what}", error.rule, error.remedy
                ) from error

    @property
    def identity(self) -> dict[str, Any]:
        """What a folder's sweep must agree on to be continued; JSON."""
        own = {key: getattr(self.options, key) for key in _FILE_KEYS if key not in _NOT_ASKED}
        return {**_plain(own), "recipe": self.recipe, "settings": dict(self.table)}


def read(word: str, arguments: Sequence[str]) -> Asked:
    """What a file, or a sweep's folder, and flags ask for."""
    folder = folder_of(word)
    kept = record.load(folder) if folder is not None else None
    if folder is not None and kept is not None:
        base, own, table = {}, dict(kept.asked), kept.asked["settings"]
        where, path = f"in {folder / record.NAME}", folder
        del own["settings"]
        own["name"] = folder.name
        arguments = ["--runs-dir", str(folder.parent), *arguments]
    else:
        path, where = _file_of(word), f"in {word}"
        table = configs.load_toml(path)
        own = {key: table.pop(key) for key in list(table) if key in _FILE_KEYS}
        base = _base_of(path, own)
    recipe = str(own.get("recipe") or base.pop("recipe", ""))
    if not recipe:
        raise UniRLError(
            f'"{path}" says neither base nor recipe',
            "a sweep needs to know what its runs train",
            'write base = "@cartpole", or recipe = "impala" and its tables',
        )
    with large_imports():
        module = registry.recipe(recipe)
    for part, source in ((base, f'in base "{own.get("base")}"'), (table, where)):
        configs.check_keys(module.Config, part, source)
    options, changes = _options(arguments, own, module.Config)
    space = read_space(module.Config, options.space, f"[space] {where}")
    _check_space(space, options, where)
    merged = configs.merge(base, table, configs.nest(module.Config, changes))
    settings = _typed(configs.from_mapping(module.Config, merged), merged)
    _check_alerts(settings)
    return Asked(options, space, recipe, module, settings, path.stem, {})


def _options(
    arguments: Sequence[str], own: Mapping[str, Any], recipe: type
) -> tuple[SweepOptions, dict[str, Any]]:
    """The sweep's settings, and flags of the recipe by dotted key."""
    positional, flags = configs.parse_flags(arguments, SweepOptions, recipe)
    if positional[1:]:
        raise UniRLError(
            f'"{positional[1]}" is one argument too many',
            "unirl sweep takes one file and --key value",
            "see unirl sweep --help",
        )
    mine = {item.key: item for item in configs.fields_help(SweepOptions)}
    is_mine = {key: key in mine or key.partition(".")[0] == "space" for key in flags}
    given = {key: value for key, value in flags.items() if is_mine[key]}
    table = configs.merge(own, configs.nest(SweepOptions, given))
    configs.check_keys(SweepOptions, table)
    changes = {key: value for key, value in flags.items() if not is_mine[key]}
    return configs.from_mapping(SweepOptions, table), changes


def folder_of(word: str) -> Path | None:
    """The folder of a sweep, by its path or by its name under runs/."""
    for folder in (Path(word), Path("runs") / word):
        if (folder / record.NAME).is_file():
            return folder
    return None


def _file_of(word: str) -> Path:
    path = config_file(word[1:]) if word.startswith("@") else Path(word)
    if path.is_dir():
        raise UniRLError(
            f'"{path}" is no sweep',
            f"the folder of one has a {record.NAME}",
            "name a sweep's file: unirl sweep sweep.toml",
        )
    return path


def _base_of(path: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of the config that trials change."""
    name = str(own.get("base", "")).removeprefix("@")
    if not name:
        return {}
    is_path = "/" in name or name.endswith(".toml")
    table = configs.load_toml(path.parent / name if is_path else config_file(name))
    table.pop("name", None)
    named = table.get("recipe")
    if own.get("recipe") and named and named != own["recipe"]:
        raise UniRLError(
            f'base "{own["base"]}" is of recipe {named}',
            f'"{path}" says recipe = "{own["recipe"]}"',
            "leave recipe out, or take another base",
        )
    return table


def _typed(config: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with what the config made of its values: flags are text, and JSON has no paths."""
    found = {}
    for name, value in table.items():
        at = getattr(config, name)
        is_table = isinstance(value, Mapping) and dataclasses.is_dataclass(at)
        found[name] = _typed(at, value) if is_table else _plain(at)
    return found


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(child) for child in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _check_space(space: SearchSpace, options: SweepOptions, where: str) -> None:
    if not space:
        raise UniRLError(
            f"the space is empty ({where})",
            "a sweep tries values of one key or more",
            "write [space] and learner.optimizer.lr = [1e-4, 1e-3], say",
        )
    for key, instead in _OWN.items():
        if key in space and (key != "run.total_steps" or options.halving.first_steps):
            raise UniRLError(
                f"{key} is in the space ({where})", "the sweep itself sets it", instead
            )


def _check_alerts(settings: Mapping[str, Any]) -> None:
    alerts = settings.get("run", {}).get("alerts", ())
    if list(redacted(alerts)) != list(alerts):
        raise UniRLError(
            "run.alerts holds a URL",
            "it is a secret, and the files of a sweep would hold it",
            "write env:NAME, and set that variable",
        )


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value_to_toml(value)}" for key, value in settings.items())
