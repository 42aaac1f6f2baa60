"""`unirl sweep`: many runs of one config with other settings, and which of them are best."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unirl import config as configs
from unirl.commands import run_folder
from unirl.commands.arguments import first
from unirl.commands.sweep_request import Asked, read
from unirl.config.writing import value_to_toml
from unirl.errors import UniRLError
from unirl.host import usable_cores
from unirl.storage import run_lock
from unirl.sweep import methods, record, results
from unirl.sweep.config import SweepConfig, SweepOptions
from unirl.sweep.launcher import Launcher
from unirl.sweep.optuna import require_optuna
from unirl.sweep.runs import ThisMachine
from unirl.sweep.sweep import Sweep, Task

if TYPE_CHECKING:
    from unirl.core.pool import Resources
    from unirl.runners.plan import Plan


def sweep(arguments: Sequence[str]) -> int:
    """Try settings, and show what came out."""
    asked = read(first(arguments, "sweep"), arguments)
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
        propose,
        lambda settings: configs.to_toml(asked.resolve(settings).config, recipe=asked.recipe),
    )
    _check_objective(options, plan)
    if options.on == "ray":
        _check_on_ray(plan)
    folder = run_folder.in_runs_dir(options.runs_dir, options.name or asked.default_name)
    if options.dry_run or options.overwrite or not (folder / record.NAME).is_file():
        asked.check_all(propose, num_trials)
    if options.dry_run:
        _show_plan(asked, task)
        return 0
    with run_folder.held(folder):
        return _run(folder, asked, task, plan)


def _run(folder: Path, asked: Asked, task: Task, plan: Plan) -> int:
    if asked.options.overwrite:
        _clear(folder)
    kept = record.load(folder)
    if kept is None:
        _require_empty(folder)
    else:
        record.check_same(kept, asked.identity, folder)
    found = kept or record.Record(asked.identity)
    found.asked = asked.identity
    launcher = _launcher(folder, asked.options, plan)
    try:
        running = Sweep(task, folder, found, launcher)
        running.propose_all()
        print(f"{folder}: {_cost(task, asked.options)}, {launcher.describe()}", flush=True)
        why = running.run()
    finally:
        launcher.close()
    return _show(folder, found, asked, task, why)


def _launcher(folder: Path, options: SweepOptions, plan: Plan) -> Launcher:
    if options.on == "ray":
        from unirl.sweep.ray import RayNodes

        return RayNodes(folder, plan.ray, _wanted(options, plan), options.jobs)
    return ThisMachine(folder, options.jobs or max(1, usable_cores() // _num_busy(plan)))


def _wanted(options: SweepOptions, plan: Plan) -> Resources:
    from unirl.core.pool import Resources

    asked = options.resources
    cpus = float(_num_busy(plan)) if asked.cpus is None else asked.cpus
    return Resources(cpus, asked.gpus, asked.memory_gib)


def _check_on_ray(plan: Plan) -> None:
    from unirl.sweep.ray import require_ray

    require_ray()
    if plan.runner.kind == "ray":
        raise UniRLError(
            "on is ray, and so is runner.kind",
            "a run of a sweep on Ray has one node, and its runner is inline or processes",
            "leave `on` out, and the sweep starts runs that each use all nodes",
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
    # Where rungs do not wait, some continue that would not have if all had come first.
    bound = "about" if options.halving.asynchronous else "at most"
    return f"{runs}, {bound} {total:,} steps ({', '.join(words)})"


def _show_plan(asked: Asked, task: Task) -> None:
    from unirl.bench.table import print_table

    if asked.options.method == "optuna":
        print("settings are chosen as results arrive, within:")
        for key, dimension in asked.space.items():
            print(f"  {key}: {dimension}")
    else:
        trials = [task.propose(number, ()) for number in range(task.num_trials)]
        rows = [[str(i), *map(value_to_toml, one.values())] for i, one in enumerate(trials)]
        print_table(["trial", *asked.space], rows)
    print(_cost(task, asked.options))


def _show(folder: Path, found: record.Record, asked: Asked, task: Task, why: str) -> int:
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
