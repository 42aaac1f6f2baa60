"""Trials in order, the best first."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.sweep.config import ObjectiveConfig
from unirl.sweep.trial import Trial


def ranked(trials: Sequence[Trial], rung: int, objective: ObjectiveConfig) -> list[Trial]:
    """The best first, of trials that all reached the rung; the earlier where they are equal."""
    sign = -1 if objective.mode == "max" else 1
    return sorted(trials, key=lambda trial: (sign * trial.mean(rung), trial.number))


def standing(trials: Sequence[Trial], objective: ObjectiveConfig) -> list[Trial]:
    """All trials, the best first: by the rung that they reached, then by what they had there."""
    sign = -1 if objective.mode == "max" else 1

    def key(trial: Trial) -> tuple[bool, int, float, int]:
        reached, failed = trial.reached(), trial.status == "failed"
        value = sign * trial.mean(reached - 1) if reached else 0.0
        return (failed, -reached, value, trial.number)

    return sorted(trials, key=key)
