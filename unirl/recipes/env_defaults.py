"""What recipes over environments choose by their kind: how the work is spread over environments,
unrolls, processes and threads.

Figures behind it: benchmarks/RESULTS.md, plain commands.
"""

from __future__ import annotations

from unirl.recipes.defaults import Choices
from unirl.recipes.env_kind import EnvKind
from unirl.recipes.learning_defaults import choose_learning, choose_minibatches

_MANY_CORES = 4
"""From here on quick environments are worth processes: they use one core otherwise."""
_MAX_QUICK, _MAX_SLOW, _MAX_WAITING = 8, 16, 64
"""Processes that step environments. More: one learner is what limits the run."""
_OVERLAP = "actors act while the learner learns"
_SMALL = "more threads make networks this small slower"


def for_actors(choices: Choices, *, on_policy: bool) -> None:
    """Of recipes whose vector actors step environments (impala, ppo).

    on_policy: samples are never older than the weights.
    """
    if _is_best_in_one_process(choices):
        _in_one_process(choices, on_policy=on_policy)
    else:
        _in_processes(choices, on_policy=on_policy)
    _fit_actors(choices)
    if on_policy and choices.kind.images and choices["runner.kind"] != "inline":
        threads = {"runner.learner_threads": min(choices.num_cores, _MAX_QUICK)}
        choices.choose("the actors rest while it learns", threads)
    num_envs = choices["actor.num_envs"] * choices["queue.batch_size"]
    choose_learning(choices, num_envs, choices["actor.unroll_length"])


def _is_best_in_one_process(choices: Choices) -> bool:
    kind = choices.kind
    if kind.stepping in ("vectorised", "simulator") or not choices.may_start_processes:
        return True
    return kind.stepping == "quick" and not kind.images and choices.num_cores < _MANY_CORES


def _in_one_process(choices: Choices, *, on_policy: bool) -> None:
    kind = choices.kind
    if choices["runner.kind"] != "inline" and not on_policy:  # set by hand
        choices.choose(_OVERLAP, {"queue.max_staleness": 1})
    else:
        turns = {"runner.kind": "inline", "queue.max_staleness": 0}
        choices.choose("in one process acting and learning take turns, bit for bit", turns)
    if not kind.images:
        choices.choose(_SMALL, {"runner.learner_threads": 1})
    many = "a step of many costs hardly more than one of few"
    why, num_envs, length = {
        "vectorised": (many, _many(kind, 512), 16),
        "simulator": (f"{many}; unirl train ondevice does it on any device", 256, 16),
    }.get(kind.stepping, ("few environments with long unrolls learn from few samples", 16, 64))
    choices.choose(why, {"actor.num_envs": num_envs, "actor.unroll_length": length})


def _many(kind: EnvKind, number: int) -> int:
    """Environments that are stepped together: fewer where there is much to see, or to learn from
    each step.
    """
    if kind.images:
        return 16
    return number if kind.is_small and kind.family != "mujoco" else 64


def _in_processes(choices: Choices, *, on_policy: bool) -> None:
    kind, cores = choices.kind, choices.num_cores
    why = "an actor for each core, beside the learner"
    if kind.stepping == "waiting":
        why = "many environments wait at a time"
        choices.choose("each environment waits in a process of its own", {"env.engine": "async"})
        if choices["env.engine"] == "async":
            actors, num_envs, length = min(cores, 4), 32, 16
        else:
            actors, num_envs, length = min(8 * cores, _MAX_WAITING), 2, 32
    elif kind.stepping == "slow":
        actors, num_envs, length = min(cores, _MAX_SLOW), 8, 32
    else:
        actors, num_envs = min(cores, _MAX_QUICK), 16
        length = 64 if cores < _MANY_CORES else 32
    choices.choose(why, {"runner.kind": "processes", "actor.num_actors": actors})
    if not on_policy:
        choices.choose(_OVERLAP, {"queue.max_staleness": 1})
    else:
        choices.choose("samples of the newest weights alone", {"queue.max_staleness": 0})
    if kind.stepping == "atari":
        choices.choose("the actors use all cores already", {"env.num_threads": 1})
    enough = "enough for one forward pass, and an update before long"
    choices.choose(enough, {"actor.num_envs": num_envs, "actor.unroll_length": length})


def _fit_actors(choices: Choices) -> None:
    """As many rows, actors and slots as fit each other, whatever was set by hand."""
    agents, rows = choices.kind.num_agents, choices["actor.num_envs"]
    if rows % agents:
        choices.choose(f"rows of {agents} agents", {"actor.num_envs": -(-rows // agents) * agents})
    if choices["runner.kind"] == "inline":
        choices.choose("one process needs one actor", {"actor.num_actors": 1})
        return
    # Each environment of a mix has actors of its own.
    sources, ratio = max(1, len(choices["mix"])), choices["queue.max_staleness"] + 1
    actors = sources * choices["actor.num_actors"]
    slots = max(-(-actors // ratio), min(2, actors))
    choices.choose("a slot for every actor", {"queue.batch_size": slots})
    fitting = max(1, choices["queue.batch_size"] * ratio // sources)
    if fitting < choices["actor.num_actors"]:
        choices.choose("an actor for every slot", {"actor.num_actors": fitting})


def for_sampler(choices: Choices) -> None:
    """Of recipes with the shared-memory sampler (appo)."""
    kind, cores = choices.kind, choices.num_cores
    many = "one worker steps many together, while the other group is decided for"
    left = "a worker for each core that the learner leaves"
    waiting = min(8 * cores, _MAX_WAITING)
    slow = "steps compute: a worker for each core, beside policy worker and learner"
    why, workers, num_envs, length = {
        "vectorised": (many, 1, _many(kind, 256), 16),
        "simulator": (many, 1, 128, 16),
        "waiting": ("steps wait: many workers at a time", waiting, 2, 32),
        "slow": (slow, min(cores, _MAX_SLOW), 8, 32),
        "atari": (left, max(1, min(cores, _MAX_SLOW) - 1), 16, 64),
        "quick": (left, max(1, min(cores, _MAX_QUICK) - 1), 8, 64),
    }[kind.stepping]
    agents, rows = kind.num_agents, choices["sampler.batch_rows"] or num_envs
    shape = {
        "sampler.num_workers": max(workers, choices["sampler.num_policy_workers"]),
        "sampler.num_envs": max(1, min(num_envs, rows) // agents) * agents,
        "sampler.unroll_length": length,
    }
    if kind.stepping == "waiting" and choices["runner.kind"] == "ray":
        shape["sampler.worker_cpus"] = 1 / 8
    choices.choose(why, shape)
    if kind.stepping == "atari" or choices["env.engine"] == "envpool":
        choices.choose("the processes use all cores already", {"env.num_threads": 1})
    choices.choose("samples one update old at most", {"queue.max_staleness": 1})
    groups, ratio = choices["sampler.num_groups"], choices["queue.max_staleness"] + 1
    slots = -(-choices["sampler.num_workers"] * groups // ratio)
    choices.choose("a slot for every group", {"queue.batch_size": max(2, slots)})
    fitting = max(1, choices["queue.batch_size"] * ratio // groups)
    if fitting < choices["sampler.num_workers"]:
        choices.choose("a group for every slot", {"sampler.num_workers": fitting})
    num_envs = choices["sampler.num_envs"] * choices["queue.batch_size"]
    choose_learning(choices, num_envs, choices["sampler.unroll_length"])


def for_simulator(choices: Choices, *, on_cpu: bool) -> None:
    """Of the recipe that trains on a device."""
    small = choices["env.id"].startswith("torch/")
    if on_cpu:
        number = {"sim.num_envs": 2048 if small else 512}
        choices.choose("as many as fit a CPU's caches", number)
    if small:
        choices.choose("observations are short", {"policy.hidden": (64, 64)})
        if on_cpu:
            choices.choose(_SMALL, {"runner.learner_threads": 1})
    rows = choices["sim.num_envs"] * choices["queue.batch_size"] * choices["sim.unroll_length"]
    choose_minibatches(choices, choices["learner.minibatches"], rows)
