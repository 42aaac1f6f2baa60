"""`unirl sweep`: many runs of one config with other settings, and which of them are best."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl import registry
from unirl.commands import run_folder
from unirl.commands.arguments import first, settled
from unirl.config.secrets import redacted
from unirl.config.shipped import config_file
from unirl.config.writing import value_to_toml
from unirl.errors import UniRLError
from unirl.host import usable_cores
from unirl.imports import large_imports
from unirl.search_space import SearchSpace, read_space
from unirl.storage import run_lock
from unirl.sweep import methods, record, results
from unirl.sweep.config import SweepConfig, SweepOptions
from unirl.sweep.optuna import require_optuna
from unirl.sweep.sweep import Sweep, Task

if TYPE_CHECKING:
    from unirl.commands.arguments import Chosen
    from unirl.envs.answers import Answers
    from unirl.runners.plan import Plan

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
"""Settings of a sweep that may be others when it continues."""


def sweep(arguments: Sequence[str]) -> int:
    """Try settings, and show what came out."""
    asked = _read(first(arguments, "sweep"), arguments)
    options, space = asked.options, asked.space
    if options.method == "optuna":
        require_optuna()
    num_trials = methods.num_trials(options, space)
    propose = methods.proposer(options, space)
    base = asked.resolve({})
    rungs = options.halving.rungs(base.config.run.total_steps)
    plan = base.plan()
    task = Task(
        options,
        num_trials,
        rungs,
        options.jobs or max(1, usable_cores() // _num_busy(plan)),
        propose,
        lambda settings: configs.to_toml(asked.resolve(settings).config, recipe=asked.recipe),
    )
    _check_objective(options, plan)
    folder = run_folder.in_runs_dir(options.runs_dir, options.name or asked.default_name)
    if options.dry_run:
        asked.check_all(task)
        _show_plan(asked, task)
        return 0
    with run_folder.held(folder):
        return _run(folder, asked, task)


def _run(folder: Path, asked: _Asked, task: Task) -> int:
    if asked.options.overwrite:
        _clear(folder)
    kept = record.load(folder)
    if kept is None:
        _require_empty(folder)
        asked.check_all(task)
    else:
        record.check_same(kept, asked.identity, folder)
    found = kept or record.Record(asked.identity)
    running = Sweep(task, folder, found)
    running.propose_all()
    print(f"{folder}: {_cost(task, asked.options)}, {task.jobs} at a time", flush=True)
    why = running.run()
    return _show(folder, found, asked, task, why)


@dataclass(frozen=True)
class _Asked:
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

    def check_all(self, task: Task) -> None:
        """Raise UniRLError where a trial is not allowed: of Optuna's, where an end of a range is
        not.
        """
        if self.options.method == "optuna":
            every = methods.corners(self.space)
        else:
            every = [task.propose(number, ()) for number in range(task.num_trials)]
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


def _read(word: str, arguments: Sequence[str]) -> _Asked:
    """What a file, or a sweep's folder, and flags ask for."""
    folder = _folder_of(word)
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
    return _Asked(options, space, recipe, module, settings, path.stem, {})


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


def _folder_of(word: str) -> Path | None:
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


def _check_objective(options: SweepOptions, plan: Plan) -> None:
    metric = options.objective.metric
    if metric.startswith("eval/") and not plan.run.eval_steps:
        raise UniRLError(
            f'objective.metric is "{metric}", and run.eval_steps is 0',
            "without evaluations no run writes it",
            "set run.eval_steps to the steps between two evaluations",
        )


def _num_busy(plan: Plan) -> int:
    """Processes of a run that compute."""
    if plan.runner.is_inline:
        return 1
    helpers = sum(pool.helpers.count for pool in plan.pools if pool.helpers is not None)
    return 1 + helpers + sum(pool.bounds[1] for pool in plan.pools)


def _clear(folder: Path) -> None:
    """Delete a sweep, but for the lock. Raises UniRLError where the folder is none."""
    if not any(path.name != run_lock.NAME for path in folder.iterdir()):
        return
    if not (folder / record.NAME).is_file():
        raise UniRLError(
            f'"{folder}" is no sweep, so --overwrite does not delete it',
            f"the folder of one has a {record.NAME}",
            "choose another --name, or delete it yourself",
        )
    # Last what says that it is a sweep: a kill in between must not make it another's.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == record.NAME):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != run_lock.NAME:
            path.unlink()


def _require_empty(folder: Path) -> None:
    if found := [path.name for path in folder.iterdir() if path.name != run_lock.NAME]:
        raise UniRLError(
            f'folder "{folder}" exists, and is no sweep',
            f"a sweep needs a folder of its own, and this one has {', '.join(sorted(found)[:5])}",
            "choose another --name",
        )


def _cost(task: Task, options: SweepConfig) -> str:
    """What is to be done, at most, in words."""
    seeds, left, total, before, words = len(options.seeds), task.num_trials, 0, 0, []
    for rung in task.rungs:
        total += left * seeds * (rung - before)
        words.append(f"{left} to {rung:,}")
        left, before = max(1, left // options.halving.reduction), rung
    runs = f"{task.num_trials} trials x {seeds} seed(s)"
    return f"{runs}, at most {total:,} steps ({', '.join(words)})"


def _show_plan(asked: _Asked, task: Task) -> None:
    from unirl.bench.table import print_table

    if asked.options.method == "optuna":
        print("settings are chosen as results arrive, within:")
        for key, dimension in asked.space.items():
            print(f"  {key}: {dimension}")
    else:
        trials = [task.propose(number, ()) for number in range(task.num_trials)]
        rows = [[str(i), *map(value_to_toml, one.values())] for i, one in enumerate(trials)]
        print_table(["trial", *asked.space], rows)
    print(f"{_cost(task, asked.options)}, {task.jobs} at a time")


def _show(folder: Path, found: record.Record, asked: _Asked, task: Task, why: str) -> int:
    from unirl.bench.table import print_table

    options = asked.options
    best = results.write(folder, found, options, task.rungs)
    rows = results.rows(found, options, task.rungs)
    print_table(*results.table(rows, options, list(asked.space)), bold=0 if best else -1)
    if why:
        print(f"stopped: {why}\ncontinue with:  unirl sweep {shlex.quote(str(folder))}")
    elif best is None:
        raise UniRLError(
            f"all {len(rows)} trials of {folder} failed",
            rows[0]["reason"],
            f"see {folder / 'logs'}, then start again with --overwrite",
        )
    else:
        print(f"wrote {folder}/results.csv, results.json\nnext:  unirl train @{best}")
    return 0


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value_to_toml(value)}" for key, value in settings.items())
