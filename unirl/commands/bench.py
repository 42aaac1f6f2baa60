"""`unirl bench`: what each stage of a plan can do, what limits it, and the benchmark scripts of a
clone; source: none.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from unirl import config as configs
from unirl import registry
from unirl.commands.arguments import split
from unirl.commands.shipped import shipped_configs
from unirl.commands.train import recipe_and_files
from unirl.errors import UniRLError

if TYPE_CHECKING:
    from unirl.bench.limits import Limit
    from unirl.bench.stages import Figures, StageName
    from unirl.runners.plan import Plan

T = TypeVar("T")

_QUIET_CORES = 0.15
"""What other processes may use without being mentioned."""


@dataclass(frozen=True)
class Suite:
    """Shipped configs that belong together."""

    summary: str
    """One line."""
    configs: tuple[str, ...]
    """Their names, measured in this order."""
    needs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The module and the extra without which a config is left out."""


@dataclass(frozen=True)
class Scripts:
    """Benchmark scripts of a clone that belong together."""

    summary: str
    """One line."""
    scripts: tuple[tuple[str, ...], ...]
    """Files of benchmarks/ with their arguments, run in this order."""


SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "atari": Suite("Pong: IMPALA and asynchronous PPO (shallow CNN).", ("pong", "appo-pong")),
        "mujoco": Suite(
            "HalfCheetah: IMPALA, asynchronous PPO, PPO.",
            ("halfcheetah", "appo-halfcheetah", "ppo-halfcheetah"),
        ),
        "classic": Suite("CartPole: IMPALA, PPO.", ("cartpole", "ppo-cartpole")),
        "isaac": Suite(
            "Simulators on a device: Cartpole in torch, Ant on MuJoCo Warp.",
            ("sim-cartpole", "warp-ant"),
            needs={"warp-ant": ("mujoco_warp", "warp")},
        ),
    }
)
"""Suites by name."""

SCRIPTS: Mapping[str, Scripts] = MappingProxyType(
    {
        "queue": Scripts("What moving one sample costs, beside a memcpy.", (("queue_speed.py",),)),
        "classic": Scripts(
            "Training throughput on Pong, then on CartPole, beside other systems.",
            (("throughput.py", "pong"), ("throughput.py", "cartpole")),
        ),
    }
)
"""What `unirl bench scripts` runs, by name."""


@dataclass(frozen=True)
class BenchOptions:
    """Flags of `unirl bench` besides the recipe's own."""

    seconds: float = 10.0
    """How long each stage is measured, after start and warm-up. More: steadier figures."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        check_seconds(self.seconds)


@dataclass(frozen=True)
class Chosen:
    """A recipe with its config, as a command line gave it."""

    title: str
    """The run's name in the config file, or the recipe's."""
    recipe: str
    module: ModuleType
    config: Any

    def plan(self) -> Plan:
        """The plan; nothing is started."""
        plan: Plan = self.module.plan(self.config)
        return plan


def bench(arguments: Sequence[str]) -> int:
    """Measure a suite or a plan of one's own, or run scripts. Without arguments: list them."""
    if not arguments:
        _list({name: suite.summary for name, suite in SUITES.items()})
        _list({f"scripts {name}": one.summary for name, one in SCRIPTS.items()})
        return 0
    if arguments[0] == "scripts":
        return _run_scripts(arguments[1:])
    name, _ = _name_and_files(arguments, BenchOptions)
    rest = list(arguments)
    wanted: Sequence[Sequence[str]] = [rest]
    absent: Mapping[str, str] = {}
    if name is not None and name in SUITES:
        rest.remove(name)
        absent = left_out(SUITES[name])
        present = [config for config in SUITES[name].configs if config not in absent]
        wanted = [[f"@{config}", *rest] for config in present]
    elif name is not None and name not in registry.RECIPES and "." not in name:
        known = [*SUITES, "scripts", *registry.RECIPES]
        raise UniRLError(
            f'"{name}" cannot be measured',
            f"there are {', '.join(known)}, and configs such as @pong",
            _way_to(name)
            or configs.suggestion(name, known)
            or "see what they measure: unirl bench",
        )
    # All are read before the first is measured: what cannot be run fails at once.
    chosen = [choose(words, BenchOptions, "bench") for words in wanted]
    plans = [(one, one.plan()) for one, _ in chosen]
    options = chosen[0][1]
    for config, reason in absent.items():
        say(f"{config} is left out: {reason}")
    reports = [_measure(one, plan, options) for one, plan in plans]
    if options.json:
        from unirl.host import usable_cores

        suite = name if name in SUITES else None
        head = {"suite": suite, "seconds": options.seconds, "cores": usable_cores()}
        print(json.dumps({**head, "plans": reports, "left_out": dict(absent)}))
    return 0


def choose(arguments: Sequence[str], options: type[T], command: str) -> tuple[Chosen, T]:
    """What the words of a command choose: recipe, then config files in order, then flags.

    options: the command's own flags.
    """
    name, files = _name_and_files(arguments, options)
    tables = {path: configs.load_toml(path) for path in files}
    named = {path: table.pop("recipe") for path, table in tables.items() if "recipe" in table}
    titles = [str(table.pop("name")) for table in tables.values() if "name" in table]
    for path, other in named.items():
        if name is not None and other != name:
            raise UniRLError(
                f'"{path}" is for another recipe',
                f'it says recipe = "{other}", the recipe asked for is "{name}"',
                f"leave {name} out, or take another config file",
            )
        name = str(other)
    if name is None:
        raise UniRLError(
            "no recipe was given",
            f"unirl {command} takes a recipe, or a config file that names one",
            f"try unirl {command} @pong, and see unirl list configs",
        )
    module = registry.recipe(name)
    for path, table in tables.items():
        configs.check_keys(module.Config, table, f"in {path}")
    positional, flags = configs.parse_flags(arguments, options, module.Config)
    surplus = [word for word in positional if word != name and not word.startswith("@")]
    if surplus:
        raise UniRLError(
            f'"{surplus[0]}" is one argument too many',
            f"{command} takes one recipe, @files and --key value",
            f"see unirl {command} --help",
        )
    own, changes = split(flags, options)
    config = configs.from_mapping(
        module.Config, configs.merge(*tables.values(), configs.nest(module.Config, changes))
    )
    title = titles[-1] if titles else name
    return Chosen(title, name, module, config), configs.from_mapping(options, own)


def check_seconds(seconds: float) -> None:
    """Raise UniRLError unless something can be measured in so many seconds."""
    if not seconds > 0:
        raise UniRLError(
            f"--seconds is {seconds:g}", "--seconds > 0 must hold", "10 gives steady figures"
        )


def say(text: str) -> None:
    """What is being done now, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def _name_and_files(arguments: Sequence[str], options: type) -> tuple[str | None, list[Path]]:
    """As for train. A switch of this command's own takes no value."""
    switches = {configs.flag_of(o.key) for o in configs.fields_help(options) if o.is_switch}
    return recipe_and_files([word for word in arguments if word not in switches])


def _way_to(name: str) -> str | None:
    """What was probably meant by a word that is no suite and no recipe."""
    if name in SCRIPTS:
        return f"it is a script: unirl bench scripts {name}"
    if name in shipped_configs():
        return f"it is a config: unirl bench @{name}"
    return None


def left_out(suite: Suite) -> dict[str, str]:
    """Configs that cannot be measured here, each with the reason."""
    return {
        config: f"{module} is not installed (pip install 'unirl[{extra}]')"
        for config, (module, extra) in suite.needs.items()
        if importlib.util.find_spec(module) is None
    }


def _measure(chosen: Chosen, plan: Plan, options: BenchOptions) -> dict[str, Any]:
    """Measure the stages of a plan, print them unless they shall be JSON, return them as such."""
    from unirl.bench.errors import Unmeasurable
    from unirl.bench.limits import find_limit
    from unirl.bench.stages import stages_of
    from unirl.bench.trial import Trial
    from unirl.host import usable_cores

    figures: dict[StageName, Figures] = {}
    reasons: dict[StageName, str] = {}
    # End to end first: it tells how many environments a policy worker decides for at a time.
    stages = stages_of(plan)
    for stage in reversed(stages):
        if not options.json:
            say(f"{chosen.title}: {stage.replace('_', ' ')}, {options.seconds:g} s ...")
        rows = figures.get("end_to_end", {}).get("rows_per_forward")
        try:
            figures[stage] = Trial(stage, plan, options.seconds, rows).run()
        except Unmeasurable as error:
            reasons[stage] = error.what
    limit = find_limit(plan, figures, usable_cores())
    if not options.json:
        _print(chosen, plan, figures, reasons, limit)
    return {
        "name": chosen.title,
        "recipe": chosen.recipe,
        "env": _env_id(chosen.config),
        "runner": plan.runner.kind,
        "stages": {stage: figures.get(stage) for stage in stages},
        "not_measured": reasons,
        "limit": {"stage": limit.stage, "text": limit.text, "settings": list(limit.settings)},
    }


def _print(
    chosen: Chosen,
    plan: Plan,
    figures: Mapping[StageName, Figures],
    reasons: Mapping[StageName, str],
    limit: Limit,
) -> None:
    from unirl.bench.stages import stages_of
    from unirl.bench.table import print_table

    words = [chosen.title, chosen.recipe, _env_id(chosen.config), plan.runner.kind]
    print(" ".join(dict.fromkeys(word for word in words if word)))
    stages, columns = stages_of(plan), ["stage", "env steps/s"]
    is_simulated = "simulation" in stages
    if is_simulated:
        columns.append("physics steps/s")
    columns += ["core-us/step", "cores", "peak MB", "staleness mean, max"]
    rows = []
    for stage in stages:
        one, name = figures.get(stage), stage.replace("_", " ")
        if one is None:
            rows.append([name, *["-"] * (len(columns) - 1)])
            continue
        ages = "-"
        if "staleness_mean" in one:
            ages = f"{one['staleness_mean']:.2f}, {one['staleness_max']:.0f}"
        rate, *others = figure_cells(one)
        if is_simulated:
            physics = one.get("physics_steps_per_second")
            others.insert(0, "-" if physics is None else f"{physics:,.0f}")
        rows.append([name, rate, *others, ages])
    print_table(columns, rows, bold=len(stages) - 1)
    for stage, reason in reasons.items():
        print(f"{stage.replace('_', ' ')} was not measured: {reason}")
    if "host_reads_per_iteration" in (whole := figures.get("end_to_end", {})):
        places = ", ".join(whole["host_reads_at"])
        print(f"Host reads: {whole['host_reads_per_iteration']:g} per iteration ({places}).")
    print(limit.text)
    for line in disturbance(figures.values()):
        print(line)
    print(flush=True)


def figure_cells(figures: Figures) -> list[str]:
    """Rate, cost of a step, cores and memory as a table shows them."""
    cost = figures["core_us_per_env_step"]
    return [
        f"{figures['env_steps_per_second']:,.0f}",
        f"{cost:,.1f}" if cost >= 10 else f"{cost:.2f}",  # simulators need less than 1
        f"{figures['cores_used']:.2f}",
        f"{figures['peak_memory_mb']:,.0f}",
    ]


def disturbance(figures: Iterable[Figures]) -> list[str]:
    """A sentence on what other processes used while these were measured, if it was much."""
    others = max(one["cores_used_by_others"] for one in figures)
    if others <= _QUIET_CORES:
        return []
    return [f"Other processes used up to {others:.1f} cores meanwhile: alone, it is faster."]


def _env_id(config: Any) -> str | None:
    env_id = getattr(getattr(config, "env", None), "id", None)
    return env_id if isinstance(env_id, str) else None


def _list(summaries: Mapping[str, str]) -> None:
    width = max(len(f"scripts {name}") for name in SCRIPTS)
    for name, summary in summaries.items():
        print(f"{name:<{width}}  {summary}")


def _run_scripts(arguments: Sequence[str]) -> int:
    """Run scripts of a clone's benchmarks/; further flags go to them. Without a name: list them."""
    if not arguments:
        _list({name: scripts.summary for name, scripts in SCRIPTS.items()})
        return 0
    name, *flags = arguments
    if name not in SCRIPTS:
        raise UniRLError(
            f'there are no benchmark scripts "{name}"',
            f"there are {', '.join(SCRIPTS)}",
            configs.suggestion(name, SCRIPTS) or "see what they measure: unirl bench scripts",
        )
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    if not folder.is_dir():
        raise UniRLError(
            "benchmark scripts are not installed",
            f"they lie in benchmarks/ of a clone; there is no {folder}",
            f"clone the repository and run unirl bench scripts {name} there",
        )
    for script, *words in SCRIPTS[name].scripts:
        code = _run(folder / script, [*words, *flags], name)
        if code:
            return code
    return 0


def _run(script: Path, words: Sequence[str], name: str) -> int:
    if not script.is_file():
        raise UniRLError(
            f'the benchmark scripts "{name}" are not complete here',
            f"they run {script.name}, and {script.parent} has no such file",
            "update the clone",
        )
    command = [sys.executable, str(script), *words]
    print(f"== {shlex.join(command[1:])}", flush=True)
    return subprocess.run(command, cwd=script.parent.parent).returncode
