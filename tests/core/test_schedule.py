"""Schedules: constant, linear, cosine, and functions of the user's own."""

from __future__ import annotations

import pytest

import unirl
from unirl.core.schedule import Schedule, check_name, check_own
from unirl.core.training_budget import ScheduleProgress, TrainingBudget
from unirl.errors import UniRLError

OWN = "tests.schedules:warm_then_half"
KEY = "learner.optimizer.lr_schedule"


def factors(name: str, *steps: int, anneal_from: float = 0.0) -> list[float]:
    """After so many of 100 steps."""
    progress = ScheduleProgress(TrainingBudget(100, anneal_from=anneal_from))
    return [Schedule(name, KEY, progress).factor(number) for number in steps]


def test_a_cosine_falls_slowly_at_both_ends_and_from_where_the_run_says() -> None:
    assert factors("cosine", 0, 25, 50, 75, 100, 150) == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0], abs=1e-6
    )
    assert factors("cosine", 50, 75, anneal_from=0.5) == pytest.approx([1.0, 0.5])


def test_an_own_function_gets_the_share_of_the_run_that_is_done() -> None:
    assert factors(OWN, 0, 10, 25, 100, 150) == pytest.approx([0.0, 0.4, 0.5, 0.5, 0.5])


def test_an_own_function_follows_the_clock_where_the_run_does() -> None:
    progress = ScheduleProgress(TrainingBudget(100, max_seconds=10.0))
    schedule = Schedule(OWN, KEY, progress)
    progress.record_training_seconds(2.0)
    assert schedule.factor(0) == pytest.approx(0.8)


BAD = {
    "negative": r"negative returned -0\.01 where 51% .* finite and >= 0",
    "infinite": r"infinite returned inf where 100% .* finite and >= 0",
    "failing": r"failing failed where 50% .*ZeroDivisionError in .*schedules\.py:\d+",
    "wordy": r"wordy failed where 0% .*must return a number",
    "not_callable": r"not_callable is no function.*is a int",
    "warm_then_hal": r'does not exist.*did you mean "warm_then_half"\?',
}


@pytest.mark.parametrize("name", BAD)
def test_a_function_that_gives_no_factor_is_refused_before_the_run(name: str) -> None:
    with pytest.raises(UniRLError, match=BAD[name]) as error:
        check_own({KEY: f"tests.schedules:{name}"})
    assert len(error.value.parts) == 3


def test_a_mistyped_schedule_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UniRLError, match=r"lr_schedule 'liner' is unknown.*\"linear\"") as error:
        check_name("liner", KEY, "adaptive")
    assert "constant, linear, cosine, adaptive, and module:function" in str(error.value)


SETTINGS = {
    "impala": ("learner.optimizer.lr_schedule", "learner.entropy_schedule"),
    "appo": ("learner.optimizer.lr_schedule", "learner.entropy_schedule"),
    "ondevice": ("learner.optimizer.lr_schedule", "learner.entropy_schedule"),
}


@pytest.mark.parametrize("recipe", SETTINGS)
def test_recipes_ask_own_schedules_when_the_plan_is_made(recipe: str) -> None:
    for key in SETTINGS[recipe]:
        unirl.make_plan(recipe, **{key: OWN})
        with pytest.raises(UniRLError, match=rf"{key} tests\.schedules:negative returned"):
            unirl.make_plan(recipe, **{key: "tests.schedules:negative"})


def test_where_schedules_begin_to_fall_is_of_no_use_to_an_own_one() -> None:
    with pytest.raises(UniRLError, match=r"run\.anneal_from is 0\.5 and has no effect"):
        unirl.make_plan("impala", **{KEY: OWN, "run.anneal_from": 0.5})
    unirl.make_plan("impala", **{KEY: "cosine", "run.anneal_from": 0.5})
