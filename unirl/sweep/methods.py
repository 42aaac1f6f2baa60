"""Which settings trial N tries: a function of its number, and of what came out so far. Nothing is
kept in memory, so a sweep that was killed continues as it would have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

from unirl.core.seeding import derive_seed
from unirl.errors import UniRLError
from unirl.search_space import SearchSpace
from unirl.sweep.config import SweepConfig
from unirl.sweep.optuna import propose_by_tpe
from unirl.sweep.trial import Trial

Propose: TypeAlias = Callable[[int, Sequence[Trial]], dict[str, Any]]


def num_trials(config: SweepConfig, space: SearchSpace) -> int:
    """How many there are. Raises UniRLError where a grid has none, or fewer than were asked for."""
    if config.method != "grid":
        assert config.trials is not None
        return config.trials
    size = math.prod(len(_grid(key, space)) for key in space)
    if config.trials is not None and config.trials != size:
        raise UniRLError(
            f"trials is {config.trials}, and the grid has {size} points",
            "a grid tries all of them",
            "leave trials out, or set method to random",
        )
    return size


def proposer(config: SweepConfig, space: SearchSpace) -> Propose:
    """How settings are chosen."""
    if config.method == "optuna":
        return lambda number, trials: propose_by_tpe(config, space, number, trials)
    if config.method == "random":
        return lambda number, trials: _drawn(config, space, number)
    points = list(itertools.product(*(_grid(key, space) for key in space)))
    return lambda number, trials: dict(zip(space, points[number], strict=True))


def corners(space: SearchSpace) -> list[dict[str, Any]]:
    """Settings that show whether all of the space is allowed, one key after the other."""
    first = {key: dimension.ends()[0] for key, dimension in space.items()}
    return [{**first, key: value} for key, dimension in space.items() for value in dimension.ends()]


def _grid(key: str, space: SearchSpace) -> Sequence[Any]:
    values = space[key].grid()
    if values is None:
        raise UniRLError(
            f"{key} is a range without a step",
            "a grid needs to know the values: choices, or low, high and step",
            "list them, or set method to random and say how many trials",
        )
    return values


def _drawn(config: SweepConfig, space: SearchSpace, number: int) -> dict[str, Any]:
    random = Random(derive_seed(config.search_seed, "trial", number))
    return {key: dimension.draw(random) for key, dimension in space.items()}
