"""What recipes over environments choose by their kind: how the work is spread, and how is learned
from what is seen and done.

Figures behind it: benchmarks/RESULTS.md, defaults.
"""

from __future__ import annotations

from typing import Any

from unirl.recipes.defaults import Choices
from unirl.recipes.env_kind import EnvKind

_MAX_ACTORS = 16
"""Beyond that one learner is what limits a run."""
_MANY_CORES = 4
"""From here on quick environments are worth processes: they use one core otherwise."""


def for_actors(choices: Choices, *, on_policy: bool) -> None:
    """Of recipes whose vector actors step environments (impala, ppo).

    on_policy: samples are never older than the weights.
    """
    _shape_actors(choices, on_policy=on_policy)
    _fit_actors(choices)
    if on_policy and choices.kind.images and choices["runner.kind"] != "inline":
        threads = {"runner.learner_threads": min(choices.num_cores, _MAX_ACTORS // 2)}
        choices.choose("the actors rest while it learns", threads)
    num_envs = choices["actor.num_envs"] * choices["queue.batch_size"]
    _learning(choices, num_envs, choices["actor.unroll_length"])


def _shape_actors(choices: Choices, *, on_policy: bool) -> None:
    kind, cores = choices.kind, choices.num_cores
    together = {"runner.kind": "inline", "queue.max_staleness": 0, "runner.learner_threads": 1}
    if choices["runner.kind"] != "inline" and not on_policy:  # by hand: then they overlap
        together["queue.max_staleness"] = 1
    most = _MAX_ACTORS if kind.stepping == "slow" else _MAX_ACTORS // 2
    actors = {"actor.num_actors": min(cores, most)}
    apart: dict[str, Any] = {"runner.kind": "processes"}
    apart["queue.max_staleness"] = 0 if on_policy else 1

    def envs(number: int, length: int) -> dict[str, int]:
        return {"actor.num_envs": number, "actor.unroll_length": length}

    if kind.stepping == "vectorised":
        choices.choose("one process that hands nothing over is the fastest", together)
        many = "a step of many costs hardly more than one of few"
        choices.choose(many, envs(_many(kind, 512), 16))
    elif kind.stepping == "simulator":
        hint = "stepped on the CPU here; unirl train ondevice is faster, on any device"
        choices.choose(hint, {**together, **envs(256, 16)})
    elif not choices.may_start_processes or (
        kind.stepping == "quick" and cores < _MANY_CORES and not kind.images
    ):
        choices.choose("steps are cheap: one process, repeatable bit for bit", together)
        choices.choose("few environments with long unrolls learn from few samples", envs(16, 64))
    elif kind.stepping == "waiting":
        choices.choose("each environment waits in a process of its own", {"env.engine": "async"})
        if choices["env.engine"] == "async":
            shape, actors = envs(32, 16), {"actor.num_actors": min(cores, 4)}
        else:
            shape, actors = envs(2, 32), {"actor.num_actors": min(8 * cores, 4 * _MAX_ACTORS)}
        choices.choose("many wait at a time", {**apart, **actors, **shape})
    else:
        choices.choose("an actor for each core, beside the learner", {**apart, **actors})
        if kind.stepping == "atari":
            choices.choose("the actors use all cores already", {"env.num_threads": 1})
        choices.choose(
            "enough for one forward pass, and an update before long",
            envs(8, 32) if kind.stepping == "slow" else envs(16, 64 if cores < _MANY_CORES else 32),
        )


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


def _many(kind: EnvKind, number: int) -> int:
    """Environments that are stepped together: fewer where there is much to see, or to learn from
    each step.
    """
    if kind.images:
        return 16
    return number if kind.is_small and kind.family != "mujoco" else 64


def for_sampler(choices: Choices) -> None:
    """Of recipes with the shared-memory sampler (appo)."""
    kind, cores = choices.kind, choices.num_cores
    workers, envs, length = {
        "vectorised": (1, _many(kind, 256), 16),
        "simulator": (1, 128, 16),
        "waiting": (min(8 * cores, 4 * _MAX_ACTORS), 2, 32),
        "slow": (min(cores, _MAX_ACTORS), 8, 32),
        "atari": (max(1, min(cores, _MAX_ACTORS) - 1), 16, 64),
        "quick": (max(1, min(cores, _MAX_ACTORS // 2) - 1), 8, 64),
    }[kind.stepping]
    why = {
        "vectorised": "one worker steps many together, while the other group is decided for",
        "simulator": "one worker steps many together",
        "waiting": "steps wait: many workers at a time",
        "slow": "steps compute: a worker for each core, beside policy worker and learner",
    }.get(kind.stepping, "a worker for each core that the learner leaves")
    agents, rows = kind.num_agents, choices["sampler.batch_rows"] or envs
    shape = {
        "sampler.num_workers": max(workers, choices["sampler.num_policy_workers"]),
        "sampler.num_envs": max(1, min(envs, rows) // agents) * agents,
        "sampler.unroll_length": length,
    }
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
    _learning(choices, num_envs, choices["sampler.unroll_length"])


def for_simulator(choices: Choices, *, on_cpu: bool) -> None:
    """Of the recipe that trains on a device."""
    small = choices["env.id"].startswith("torch/")
    if on_cpu:
        number = {"sim.num_envs": 2048 if small else 512}
        choices.choose("of the CPU's caches, not of a GPU's size", number)
    if small:
        choices.choose("observations are short", {"policy.hidden": (64, 64)})
        if on_cpu:
            one = {"runner.learner_threads": 1}
            choices.choose("networks this small only get slower with more", one)
    rows = choices["sim.num_envs"] * choices["queue.batch_size"] * choices["sim.unroll_length"]
    _split(choices, choices["learner.minibatches"], rows)


# ----------------------------------------------------------------------------------------- learning


def _learning(choices: Choices, num_envs: int, length: int) -> None:
    """Networks and losses. num_envs, length: of a batch."""
    if choices.kind.images:
        _from_images(choices)
    elif choices.kind.continuous:
        _continuous(choices)
    else:
        _discrete(choices)
    if choices.kind.family == "box2d":
        far: dict[str, Any] = {"learner.gamma": 0.999, "learner.lambda_": 0.98}
        if choices["policy.core"] == "none":
            far["policy.shared_torso"] = False
        choices.choose("episodes of a thousand steps are decided at their end", far)
    clip = choices["learner.policy_clip"]
    steps = clip is not None and choices["policy.core"] == "none"
    _split(choices, choices["learner.minibatches"], num_envs * (length if steps else 1))


def _from_images(choices: Choices) -> None:
    if choices["policy.torso"] == "auto":
        choices.choose(
            "half the cost of the Nature CNN; bfloat16 where the CPU multiplies it",
            {"policy.torso": "shallow", "policy.feature_size": 256, "policy.compute_dtype": "auto"},
        )
    if choices["policy.torso"] != "mlp":
        choices.choose(
            "what is small on a still background is learned several times faster",
            {"policy.normalize_images": True, "policy.pixel_min_std": 32.0},
        )
    _passes(choices, 2, 16, "two clipped passes in small minibatches", clip=True)
    choices.choose(
        "for whitened pixels",
        {
            "learner.optimizer.lr": 5e-4,
            "learner.entropy_coef": 0.015,
            "learner.entropy_schedule": "linear",
        },
    )


def _continuous(choices: Choices) -> None:
    if choices["policy.core"] == "none":
        choices.choose(
            "values and torques do not pull at the same features", {"policy.shared_torso": False}
        )
    _whiten(choices)
    _passes(choices, 4, 4, "four passes over each batch", clip=False)
    choices.choose(
        "the deviation explores by itself",
        {"learner.entropy_coef": 0.0, "learner.optimizer.lr": 3e-4},
    )
    if choices.kind.family == "mujoco" and choices["learner.policy_clip"] is not None:
        choices.choose(
            "small first actions, advantages as large as they are: robots stay on their feet",
            {"policy.initial_std": 0.4, "learner.normalize_advantage": False},
        )


def _discrete(choices: Choices) -> None:
    many = choices.kind.stepping == "vectorised"
    if not choices.kind.is_small:
        choices.choose("long observations", {"policy.hidden": (128, 128)})
    if not many:
        _whiten(choices)
    if choices.kind.stepping in ("slow", "waiting"):
        _passes(choices, 8, 4, "samples are dear: many clipped passes", clip=True)
    else:
        # Many environments make large batches: as many steps of the optimiser for all of them.
        counts = (2, 8) if many else (4, 4)
        _passes(choices, *counts, "clipped passes need fewer samples", clip=True)
    choices.choose("for small networks", {"learner.optimizer.lr": 2e-3 if many else 1e-3})


def _whiten(choices: Choices) -> None:
    if choices.kind.unscaled:
        choices.choose("observations have any scale", {"policy.normalize_obs": True})


def _passes(choices: Choices, epochs: int, minibatches: int, why: str, *, clip: bool) -> None:
    """Clip, passes and minibatches belong together: one set by hand leaves the clip alone."""
    together: dict[str, Any] = {"learner.epochs": epochs, "learner.minibatches": minibatches}
    by_hand = choices.is_given("learner.epochs", "learner.minibatches")
    if choices["learner.policy_clip"] is None and clip and not by_hand:
        together["learner.policy_clip"] = 0.2
    choices.choose(why, together)
    scale: dict[str, Any] = {"learner.lambda_": 0.95, "learner.normalize_reward": True}
    if choices["learner.policy_clip"] is not None:
        scale["learner.normalize_advantage"] = True
    choices.choose("one scale, whatever the environment's rewards", scale)
    choices.choose("the last weights are steady ones", {"learner.optimizer.lr_schedule": "linear"})


def _split(choices: Choices, minibatches: int, pieces: int) -> None:
    """At most so many minibatches that a batch splits into them evenly."""
    most = max(n for n in range(1, minibatches + 1) if pieces % n == 0)
    choices.choose(f"a batch of {pieces} splits evenly", {"learner.minibatches": most})
