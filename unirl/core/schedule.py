"""What a coefficient is multiplied by while a run goes from its start to its end: a factor by name,
or a function of the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from unirl.core.training_budget import ScheduleProgress
from unirl.errors import ActorFailed, UniRLError, format_error, suggestion
from unirl.imports import is_own, load_own

ScheduleName: TypeAlias = "Literal['constant', 'linear', 'cosine'] | str"
"""Text beside these is `module:function`, from the share of the run that is done, 0 to 1, to a
finite factor >= 0.
"""
NAMES = ("constant", "linear", "cosine")
_TRIED = 101
"""Shares of a run that a function is asked about before the run starts."""


class Schedule:
    """The factor of one setting. key: what the setting is called."""

    def __init__(self, name: str, key: str, progress: ScheduleProgress) -> None:
        self._name, self._key, self._progress = name, key, progress
        self._own = _load(name, key) if is_own(name) else None

    def factor(self, num_steps: int) -> float:
        """After `num_steps` samples. ActorFailed where the user's own function gives none."""
        if self._own is not None:
            return _ask(self._own, self._progress.done(num_steps), self._name, self._key)
        if self._name == "constant":
            return 1.0
        left = self._progress.left(num_steps)
        return left if self._name == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)


def is_schedule(name: str) -> bool:
    return name in NAMES or is_own(name)


def check_name(name: str, key: str, *others: str) -> None:
    """Raise UniRLError for what is no schedule. others: names that this setting has besides."""
    if not is_schedule(name) and name not in others:
        known = (*NAMES, *others)
        raise UniRLError(
            f"{key} {name!r} is unknown",
            f"known: {', '.join(known)}, and module:function of your own",
            suggestion(name, known) or "choose one",
        )


def check_own(schedules: Mapping[str, str]) -> None:
    """Raise UniRLError for functions that cannot be loaded, or give no factor somewhere in a run.
    schedules: names by their keys.
    """
    for key, name in schedules.items():
        if is_own(name):
            function = _load(name, key)
            for i in range(_TRIED):
                _ask(function, i / (_TRIED - 1), name, key)


def _load(name: str, key: str) -> Callable[[float], float]:
    function: Callable[[float], float] = load_own(name, f"{key} {name}")
    if not callable(function):
        raise UniRLError(
            f"{key} {name} is no function",
            f"it must take the share of the run that is done, and is a {type(function).__name__}",
            "name a function, such as: def half(done): return 1 - done / 2",
        )
    return function


def _ask(function: Callable[[float], float], done: float, name: str, key: str) -> float:
    remedy = "correct it: it takes the share of the run that is done, and returns a factor"
    try:
        factor = float(function(done))
    except Exception as error:
        raise ActorFailed(
            f"{key} {name} failed where {done:.0%} of the run is done: {format_error(error)}",
            "it must return a number for each share from 0 to 1",
            remedy,
        ) from error
    if not math.isfinite(factor) or factor < 0:
        raise ActorFailed(
            f"{key} {name} returned {factor:g} where {done:.0%} of the run is done",
            "a factor must be finite and >= 0",
            remedy,
        )
    return factor
