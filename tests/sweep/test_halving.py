"""Who continues from a rung, and in what order trials are shown."""

from __future__ import annotations

import pytest

from unirl.sweep.config import HalvingConfig, ObjectiveConfig
from unirl.sweep.halving import decide
from unirl.sweep.ranking import standing
from unirl.sweep.trial import SeedRun, Trial

MAX, MIN = ObjectiveConfig(), ObjectiveConfig(mode="min")
HALVING = HalvingConfig(first_steps=10, reduction=3)


def trials(*values: float) -> list[Trial]:
    """One run each, at the first rung with these values."""
    return [Trial(i, {}, [SeedRun(1, [value])]) for i, value in enumerate(values)]


def continuing(found: list[Trial]) -> list[int]:
    return [trial.number for trial in found if trial.status == "running"]


def test_rungs_grow_by_the_reduction_and_end_at_the_last_step() -> None:
    assert HALVING.rungs(1000) == (10, 30, 90, 270, 810, 1000)
    assert HALVING.rungs(90) == (10, 30, 90)
    assert HALVING.rungs(5) == HalvingConfig().rungs(5) == (5,)


@pytest.mark.parametrize(("objective", "best"), [(MAX, [1, 4]), (MIN, [0, 3])])
def test_the_best_third_continues_once_all_have_come(
    objective: ObjectiveConfig, best: list[int]
) -> None:
    found = trials(1, 9, 5, 2, 8, 6)
    last = found.pop()
    assert not decide(found, 6, 2, HALVING, objective)  # one does not exist yet
    value = last.runs[0].values.pop()
    assert not decide([*found, last], 6, 2, HALVING, objective)  # or has not come
    last.runs[0].values.append(value)
    found.append(last)
    assert decide(found, 6, 2, HALVING, objective)
    assert continuing(found) == best and all(found[i].rung == 1 for i in best)
    assert not decide(found, 6, 2, HALVING, objective)


def test_what_failed_is_neither_waited_for_nor_counted_nor_best() -> None:
    found = trials(1, 9, 5, 2)
    found[1].fail(found[1].runs[0], "diverged")
    decide(found, 4, 2, HALVING, MAX)
    assert continuing(found) == [2]
    found[2].runs[0].values.append(7)
    decide(found, 4, 2, HALVING, MAX)
    assert [t.status for t in found] == ["stopped", "failed", "finished", "stopped"]
    assert [t.number for t in standing(found, MAX)] == [2, 3, 0, 1]


def test_a_trial_is_judged_by_the_mean_over_its_seeds() -> None:
    steady = Trial(0, {}, [SeedRun(1, [5.0]), SeedRun(2, [5.0])])
    lucky = Trial(1, {}, [SeedRun(1, [9.0]), SeedRun(2, [0.0])])
    decide([lucky, steady], 2, 2, HALVING, MAX)
    assert (steady.status, lucky.status) == ("running", "stopped")
    assert steady.std(0) == 0 and lucky.mean(0) == 4.5


def test_a_record_comes_back_from_json_as_it_was() -> None:
    trial = Trial(3, {"lr": 0.1}, [SeedRun(1, [2.5], 20)], rung=1, status="stopped")
    assert Trial.from_json(trial.to_json()) == trial
