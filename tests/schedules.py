"""Schedules of a user's own, for tests that name them `tests.schedules:...`."""

from __future__ import annotations

import math

WARM = 0.25
not_callable = 3


def warm_then_half(done: float) -> float:
    """Rises over a quarter of the run, then is one half."""
    return done / WARM if done < WARM else 0.5


def negative(done: float) -> float:
    return 0.5 - done


def infinite(done: float) -> float:
    return math.inf if done == 1 else 1.0


def failing(done: float) -> float:
    return 1 / abs(done - 0.5)


def wordy(done: float) -> str:
    return "half"
