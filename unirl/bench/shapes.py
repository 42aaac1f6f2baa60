"""Shapes of a plan: how its work is spread over processes, groups, slots and threads. A search
turns one knob after the other, from the fastest shape so far.

Unless asked otherwise, every shape has as many samples per update as the first: queue.batch_size
slots of num_envs environments. Unrolls keep their length and the queue its max_staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from unirl.actors.device import SimConfig
from unirl.actors.sampler import SamplerConfig
from unirl.actors.vector import ActorConfig
from unirl.bench.section import section
from unirl.bench.stages import Figures
from unirl.errors import UniRLError

Shape: TypeAlias = Mapping[str, Any]
"""Values by dotted key, the same keys in every shape of a plan."""
Knob: TypeAlias = Callable[[Shape], Iterator[Shape]]
"""From a shape to those that differ from it in one respect."""

MANY_ENVS = (1024, 2048, 4096)
"""Tried where stepping many environments together costs little more than stepping few; a batch has
at most the last of them. Larger ones are faster still, as the optimiser's steps stay as many, and
learn less and less from a sample.
"""
_GAIN = 1.03
"""Less is within what two measurements of the same differ by."""


@dataclass(frozen=True)
class Tried:
    """What came of one shape."""

    shape: Shape
    figures: Figures | None
    """Of the plan end to end; None: it cannot be run."""
    reason: str = ""
    """Why not."""

    @property
    def rate(self) -> float:
        """Environment steps per second; 0 of what cannot be run."""
        return 0.0 if self.figures is None else float(self.figures["env_steps_per_second"])


def start_of(config: Any, num_cores: int) -> Shape:
    """The shape that a config has. Raises UniRLError for one that has no sampler and no actor."""
    name, kind = _production(config)
    keys = {
        SamplerConfig: ("num_workers", "num_groups", "num_envs", "num_policy_workers"),
        ActorConfig: ("num_actors", "num_envs"),
        SimConfig: ("num_envs",),
    }[kind]
    production, runner = getattr(config, name), config.runner
    shape = {f"{name}.{key}": getattr(production, key) for key in keys}
    shape["queue.batch_size"] = config.queue.batch_size
    if kind is ActorConfig:
        shape["runner.kind"] = runner.kind
    # What 0 stands for, so that no shape is tried twice.
    usual = 1 if runner.kind == "processes" else num_cores
    shape["runner.learner_threads"] = runner.learner_threads or usual
    return shape


def knobs_of(
    config: Any, num_cores: int, *, free_batch: bool = False, vectorised: bool = False
) -> list[Knob]:
    """What can be turned: no more processes or threads of a kind than cores; twice as many as there
    are where these are more, as environments then wait.

    free_batch: samples per update may change. vectorised: environments are stepped together.
    """
    name, kind = _production(config)
    production = getattr(config, name)
    current = getattr(production, "num_actors", getattr(production, "num_workers", 1))
    threads, counts = _powers(num_cores), _powers(2 * current if current > num_cores else num_cores)

    def knob(key: str, values: Sequence[int]) -> Knob:
        return lambda shape: ({**shape, key: value} for value in values)

    envs = [_envs_knob(f"{name}.num_envs", free_batch)]
    if free_batch and vectorised:
        envs.insert(0, _many_knob(f"{name}.num_envs"))
    learner = knob("runner.learner_threads", threads)
    if kind is SimConfig:
        return [learner, *(envs if free_batch else [])]
    if kind is SamplerConfig:
        knobs = [
            knob(f"{name}.num_workers", counts),
            knob(f"{name}.num_groups", (1, 2, 4)),
            *envs,
            knob(f"{name}.num_policy_workers", threads),
            learner,
        ]
    else:
        ratio = config.queue.max_staleness + 1
        knobs = [_processes_knob(name, counts, ratio), *envs, learner]
    return [*knobs, _batch_knob(f"{name}.num_envs")] if free_batch else knobs


def search(
    start: Shape, knobs: Sequence[Knob], attempt: Callable[[Shape], Tried]
) -> tuple[list[Tried], Tried]:
    """Everything that was tried, the start first, and the fastest.

    The start stays the fastest unless another gains more than what two measurements differ by.
    Raises UniRLError when the start cannot be run.
    """
    tried = [attempt(start)]
    best = tried[0]
    if best.figures is None:
        raise UniRLError(
            "the shape to start from cannot be run",
            best.reason,
            "correct the config; unirl train --dry-run shows it",
        )
    for knob in knobs:
        while True:
            seen = [one.shape for one in tried]
            fresh = [shape for shape in knob(best.shape) if shape not in seen]
            if not fresh:
                break
            found = [attempt(shape) for shape in fresh]
            tried += found
            fastest = max(found, key=lambda one: one.rate)
            if fastest.rate < _GAIN * best.rate:
                break
            best = fastest
    return tried, best


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return [2**i for i in range(most.bit_length()) if 2**i < most] + [most]


def _production(config: Any) -> tuple[str, type[Any]]:
    """The section of the config that says what steps the environments, and its class."""
    if hasattr(config, "queue") and hasattr(config, "runner"):
        for kind in (SamplerConfig, ActorConfig, SimConfig):
            if (found := section(config, kind)) is not None:
                return found[0], kind
    raise UniRLError(
        "this recipe has no shape that could be tuned",
        "its config must have the sections queue and runner, and a SamplerConfig, an ActorConfig or"
        " a SimConfig",
        "see unirl/recipes/appo.py and impala.py",
    )


def _envs_knob(key: str, free_batch: bool) -> Knob:
    """Twice and half the environments of a slot, with half and twice the slots of a batch."""

    def turn(shape: Shape) -> Iterator[Shape]:
        num_envs, batch_size = shape[key], shape["queue.batch_size"]
        if free_batch:
            if 2 * num_envs * batch_size <= MANY_ENVS[-1]:
                yield {**shape, key: 2 * num_envs}
        elif batch_size % 2 == 0:
            yield {**shape, key: 2 * num_envs, "queue.batch_size": batch_size // 2}
        if num_envs % 2 == 0:
            more = batch_size if free_batch else 2 * batch_size
            yield {**shape, key: num_envs // 2, "queue.batch_size": more}

    return turn


def _processes_knob(name: str, counts: Sequence[int], slots_ratio: int) -> Knob:
    """One process for all, or a process for each of so many actors. slots_ratio: slots of the queue
    per slot of a batch.
    """
    actors, envs = f"{name}.num_actors", f"{name}.num_envs"

    def turn(shape: Shape) -> Iterator[Shape]:
        yield {**shape, "runner.kind": "inline", actors: 1}
        for count in counts:
            apart = {**shape, "runner.kind": "processes", actors: count}
            rows = shape[envs] * shape["queue.batch_size"]
            if count > slots_ratio * shape["queue.batch_size"] and rows % count == 0:
                # Too few slots for so many actors: smaller ones.
                apart |= {envs: rows // count, "queue.batch_size": count}
            yield apart

    return turn


def _many_knob(envs: str) -> Knob:
    return lambda shape: (
        {**shape, envs: number}
        for number in MANY_ENVS
        if number * shape["queue.batch_size"] <= MANY_ENVS[-1]
    )


def _batch_knob(envs: str) -> Knob:
    def turn(shape: Shape) -> Iterator[Shape]:
        batch_size = shape["queue.batch_size"]
        if 2 * batch_size * shape[envs] <= MANY_ENVS[-1]:
            yield {**shape, "queue.batch_size": 2 * batch_size}
        if batch_size % 2 == 0:
            yield {**shape, "queue.batch_size": batch_size // 2}

    return turn
