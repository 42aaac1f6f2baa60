"""`unirl bench`: what each stage of a plan can do, what limits it, and the benchmark scripts of a
clone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl import registry
from unirl.commands.arguments import Chosen, choose, env_id_of, parse_with_recipe, recipe_and_files
from unirl.config.shipped import shipped_configs
from unirl.errors import UniRLError

if TYPE_CHECKING:
    from unirl.bench.stages import Figures, StageName
    from unirl.runners.plan import Plan

_QUIET_CORES = 0.15
"""What other processes may use without being mentioned."""


SUITES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "atari": ("Pong: IMPALA and asynchronous PPO (shallow CNN).", ("pong", "appo-pong")),
        "mujoco": (
            "HalfCheetah: IMPALA, asynchronous PPO, PPO.",
            ("halfcheetah", "appo-halfcheetah", "ppo-halfcheetah"),
        ),
        "classic": ("CartPole: IMPALA, PPO.", ("cartpole", "ppo-cartpole")),
        "isaac": (
            "Simulators on a device: Cartpole in torch, Ant on MuJoCo Warp.",
            ("sim-cartpole", "warp-ant"),
        ),
    }
)
"""By name: one line on it, and shipped configs, measured in this order."""

NEEDS: Mapping[str, tuple[str, str]] = MappingProxyType({"warp-ant": ("mujoco_warp", "warp")})
"""The module and the extra without which a config is left out."""

SCRIPTS: Mapping[str, tuple[str, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "queue": ("What moving one sample costs, beside a memcpy.", (("queue_speed.py",),)),
        "cluster": (
            "The queue server's cost by number of slots, and simulated clusters.",
            (("cluster_simulation.py",),),
        ),
        "classic": (
            "Training throughput on Pong, then on CartPole, beside other systems.",
            (("throughput.py", "pong"), ("throughput.py", "cartpole")),
        ),
    }
)
"""What `unirl bench scripts` runs, by name: one line on it, and files of benchmarks/ with their
arguments, in order.
"""


@dataclass(frozen=True)
class BenchOptions:
    """Flags of `unirl bench` besides the recipe's own."""

    seconds: float = 10.0
    """How long each measurement lasts, after start and warm-up. More: steadier figures."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        check_seconds(self.seconds)


@dataclass(frozen=True)
class ClusterOptions:
    """Flags of `unirl bench cluster` besides the shape of the cluster."""

    simulate: bool = False
    """On a virtual clock: no machine is needed."""
    json: bool = False
    """Print one JSON object instead of tables."""


def bench(arguments: Sequence[str]) -> int:
    """Measure a suite or a plan of one's own, or run scripts. Without arguments: list them."""
    if not arguments:
        _list({name: summary for name, (summary, _) in SUITES.items()})
        _list({"cluster": "A simulated cluster around the real queue server: --simulate."})
        _list({f"scripts {name}": summary for name, (summary, _) in SCRIPTS.items()})
        return 0
    if arguments[0] == "scripts":
        return _run_scripts(arguments[1:])
    if arguments[0] == "cluster":
        return _simulate(arguments[1:])
    name, _ = recipe_and_files(arguments, BenchOptions)
    rest = list(arguments)
    wanted, absent = [rest], dict[str, str]()
    if name is not None and name in SUITES:
        rest.remove(name)
        _, suite = SUITES[name]
        absent = left_out(suite)
        wanted = [[f"@{config}", *rest] for config in suite if config not in absent]
    elif name is not None and name not in registry.RECIPES and "." not in name:
        known = [*SUITES, "cluster", "scripts", *registry.RECIPES]
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

        head = {
            "suite": name if name in SUITES else None,
            "seconds": options.seconds,
            "cores": usable_cores(),
        }
        print(json.dumps({**head, "plans": reports, "left_out": absent}))
    return 0


def check_seconds(seconds: float) -> None:
    """Raise UniRLError unless something can be measured in so many seconds."""
    if not seconds > 0:
        raise UniRLError(
            f"--seconds is {seconds:g}", "--seconds > 0 must hold", "10 gives steady figures"
        )


def say(text: str) -> None:
    """What is being done now, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _way_to(name: str) -> str | None:
    """What was probably meant by a word that is no suite and no recipe."""
    if name in SCRIPTS:
        return f"it is a script: unirl bench scripts {name}"
    if name in shipped_configs():
        return f"it is a config: unirl bench @{name}"
    return None


def left_out(suite: Sequence[str], needs: Mapping[str, tuple[str, str]] = NEEDS) -> dict[str, str]:
    return {
        config: f"{module} is not installed (pip install 'unirl[{extra}]')"
        for config, (module, extra) in needs.items()
        if config in suite and importlib.util.find_spec(module) is None
    }


def _measure(chosen: Chosen, plan: Plan, options: BenchOptions) -> dict[str, Any]:
    """Measure a plan end to end and stage by stage: what is printed as JSON, or as a table."""
    from unirl.bench.limits import find_limit
    from unirl.bench.trial import run_trial
    from unirl.host import usable_cores

    if not options.json:
        say(f"{chosen.title}: end to end, then stage by stage, {options.seconds:g} s each ...")
    figures, apart, reason = run_trial(plan, options.seconds), {}, None
    try:
        apart = run_trial(plan, options.seconds, apart=True)
    except UniRLError as error:
        reason = error.what
    figures = {**apart, **figures}
    limit = find_limit(plan, figures, usable_cores())
    report = {
        "name": chosen.title,
        "recipe": chosen.recipe,
        "env": env_id_of(chosen.config),
        "runner": plan.runner.kind,
        "stages": figures,
        "not_measured": reason,
        "limit": {"stage": limit.stage, "text": limit.text, "settings": list(limit.settings)},
    }
    if not options.json:
        print_report(report)
    return report


def print_report(report: Mapping[str, Any]) -> None:
    """One plan's entry of the JSON object, for people."""
    from unirl.bench.table import print_table

    words = [report[name] for name in ("name", "recipe", "env", "runner")]
    print(" ".join(dict.fromkeys(word for word in words if word)))
    stages: Mapping[StageName, Figures] = report["stages"]
    columns = ["stage", "env steps/s", "core-us/step", "cores", "peak MB", "staleness mean, max"]
    rows = []
    for stage, one in stages.items():
        has_ages = "staleness_mean" in one
        ages = f"{one['staleness_mean']:.2f}, {one['staleness_max']:.0f}" if has_ages else "-"
        rows.append([stage.replace("_", " "), *figure_cells(one), ages])
    simulated = [one for one in stages.values() if "physics_steps_per_env_step" in one]
    for one in simulated:
        columns.insert(2, "physics steps/s")
        for row, other in zip(rows, stages.values(), strict=True):
            rate = one["physics_steps_per_env_step"] * other["env_steps_per_second"]
            row.insert(2, f"{rate:,.0f}" if other in (one, stages["end_to_end"]) else "-")
    print_table(columns, rows, bold=len(rows) - 1)
    print(report["limit"]["text"])
    if report["not_measured"] is not None:
        print(f"Stages were not measured one by one: {report['not_measured']}")
    for one in simulated:
        lines = ", ".join(one["host_reads_at"])
        print(f"Host reads: {one['host_reads_per_iteration']:g} per iteration ({lines}).")
    print("\n".join([*disturbance(stages.values()), ""]), flush=True)


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


def _simulate(arguments: Sequence[str]) -> int:
    """A cluster on a virtual clock: its rates, and what limits it."""
    from unirl.bench.cluster_shape import ClusterShape
    from unirl.bench.server_costs import ServerCosts
    from unirl.bench.simulation import Simulation
    from unirl.bench.table import print_table

    own, options, flags = parse_with_recipe(arguments, ClusterOptions, ClusterShape)
    shape = configs.from_mapping(ClusterShape, flags)
    if own or not options.simulate:
        raise UniRLError(
            f"bench cluster: {own[0]!r} is one argument too many"
            if own
            else "bench cluster does not measure a cluster of machines",
            "what it does is simulate one: unirl bench cluster --simulate [--members 2000 ...]",
            "a plan of your own on the machines that are there: unirl bench @pong",
        )
    found = Simulation(shape, ServerCosts()).run()
    if options.json:
        shown = {"shape": dataclasses.asdict(shape), "limit": found.limit}
        print(json.dumps({**shown, **dataclasses.asdict(found)}))
        return 0
    print(
        f"{shape.members:,} actors on {shape.num_nodes:,} nodes, {found.num_slots:,} slots: "
        f"{found.slots_per_second:,.0f} of {found.possible_slots_per_second:,.0f} slots/s, "
        f"{found.seconds:,.1f} simulated seconds"
    )
    print_table(
        ["station", "busy"],
        [[name, f"{share:.0%}"] for name, share in found.shares.items()],
    )
    discarded = sum(found.stats.discarded.values())
    print(
        f"staleness {found.staleness_mean:.2f}, at most {found.staleness_max}; "
        f"{found.stats.started:,} started = {found.stats.learned:,} learned + {discarded:,} "
        f"discarded + {found.stats.out:,} in flight"
    )
    print(f"The {found.limit} limit{'' if found.limit[-1] == 's' else 's'} it.")
    return 0


def _list(summaries: Mapping[str, str]) -> None:
    width = max(len(f"scripts {name}") for name in SCRIPTS)
    for name, summary in summaries.items():
        print(f"{name:<{width}}  {summary}")


def _run_scripts(arguments: Sequence[str]) -> int:
    """Run scripts of a clone's benchmarks/; further flags go to them. Without a name: list them."""
    if not arguments:
        _list({name: summary for name, (summary, _) in SCRIPTS.items()})
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
            f"they are in benchmarks/ of a clone; there is no {folder}",
            f"clone the repository and run unirl bench scripts {name} there",
        )
    for script, *words in SCRIPTS[name][1]:
        if not (folder / script).is_file():
            raise UniRLError(
                f'the benchmark scripts "{name}" are not complete here',
                f"they run {script}, and {folder} has no such file",
                "update the clone",
            )
        command = [sys.executable, str(folder / script), *words, *flags]
        print(f"== {shlex.join(command[1:])}", flush=True)
        code = subprocess.run(command, cwd=folder.parent).returncode
        if code:
            return code
    return 0
