"""What schedules fall with: samples, the clock, or whichever of both is nearer its end."""

from __future__ import annotations

import pytest

from unirl.core.training_budget import ScheduleProgress, TrainingBudget
from unirl.errors import UniRLError
from unirl.runners.config import RunConfig


def test_without_a_time_limit_the_clock_has_no_say_and_nobody_is_asked() -> None:
    def asked(seconds: float) -> float:
        raise AssertionError("a message for nothing")

    schedule = ScheduleProgress(TrainingBudget(100), leading=asked)
    schedule.record_training_seconds(1000.0)
    assert [schedule.left(steps) for steps in (0, 25, 100, 150)] == [1.0, 0.75, 0.0, 0.0]


def test_whichever_is_nearer_its_end_counts() -> None:
    schedule = ScheduleProgress(TrainingBudget(100, max_seconds=10.0))
    assert schedule.left(0) == 1.0  # no training time was recorded yet
    schedule.record_training_seconds(4.0)
    assert schedule.left(0) == pytest.approx(0.6)
    assert schedule.left(90) == pytest.approx(0.1)
    schedule.record_training_seconds(11.0)
    assert schedule.left(0) == 0.0


def test_those_who_learn_together_go_by_one_clock() -> None:
    budget = TrainingBudget(100, max_seconds=10.0)
    schedule = ScheduleProgress(budget, leading=lambda seconds: seconds + 1)
    schedule.record_training_seconds(2.0)
    assert schedule.left(0) == pytest.approx(0.7)


def test_schedules_may_stay_up_and_fall_at_the_end() -> None:
    schedule = ScheduleProgress(TrainingBudget(100, max_seconds=10.0, anneal_from=0.6))
    assert [schedule.left(steps) for steps in (0, 60)] == [1.0, 1.0]
    assert schedule.left(80) == pytest.approx(0.5)
    assert [schedule.left(steps) for steps in (100, 150)] == [0.0, 0.0]
    schedule.record_training_seconds(9.0)
    assert schedule.left(0) == pytest.approx(0.25)


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_schedules_begin_to_fall_within_the_run(share: float) -> None:
    with pytest.raises(UniRLError, match=r"run.anneal_from is .* must lie in \[0, 1\)"):
        RunConfig(anneal_from=share)
    assert RunConfig(anneal_from=0.75).budget == TrainingBudget(1_000_000, None, 0.75)


def test_schedules_over_seconds_need_a_limit() -> None:
    with pytest.raises(UniRLError, match=r"run.anneal_over is seconds and run.max_seconds"):
        RunConfig(anneal_over="seconds")
    assert RunConfig(max_seconds=9.0).budget == TrainingBudget(1_000_000)
    both = RunConfig(max_seconds=9.0, anneal_over="seconds")
    assert both.budget == TrainingBudget(1_000_000, 9.0)
