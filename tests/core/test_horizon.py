"""What schedules fall with: samples, the clock, or whichever of both is nearer its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import unirl
from unirl.core.checkpoint import load_checkpoint
from unirl.core.errors import UniRLError
from unirl.core.horizon import Countdown, Horizon
from unirl.runners.plan import RunConfig


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a countdown reads, to be set."""
    now = [1000.0]
    monkeypatch.setattr("unirl.core.horizon.time.monotonic", lambda: now[0])
    return now


def test_without_a_time_limit_the_clock_does_not_count(clock: list[float]) -> None:
    countdown = Countdown(Horizon(100), agree=lambda passed: 0.0)
    for _ in range(3):
        countdown.tick()
        clock[0] += 50
    assert countdown.seconds == 100  # for a resume that sets one
    assert [countdown.left(steps) for steps in (0, 25, 100, 150)] == [1.0, 0.75, 0.0, 0.0]


def test_whichever_is_nearer_its_end_counts(clock: list[float]) -> None:
    countdown = Countdown(Horizon(100, max_seconds=10.0))
    clock[0] += 50  # before the first update: actors were started
    countdown.tick()
    assert countdown.left(0) == 1.0
    clock[0] += 4
    assert countdown.left(0) == 1.0  # an update under way keeps its size
    countdown.tick()
    assert countdown.left(0) == pytest.approx(0.6)
    assert countdown.left(90) == pytest.approx(0.1)
    clock[0] += 7
    countdown.tick()
    assert countdown.left(0) == 0.0


def test_seconds_of_earlier_sessions_count_and_those_in_between_do_not(clock: list[float]) -> None:
    countdown = Countdown(Horizon(100, max_seconds=10.0))
    countdown.seconds = 5.0
    clock[0] += 1000
    countdown.tick()
    clock[0] += 1
    countdown.tick()
    assert countdown.left(0) == pytest.approx(0.4)


def test_others_decide_with_it_how_much_time_has_passed(clock: list[float]) -> None:
    countdown = Countdown(Horizon(100, max_seconds=10.0), agree=lambda passed: passed + 1)
    countdown.tick()
    clock[0] += 2
    countdown.tick()
    assert countdown.seconds == 4.0


def test_schedules_over_seconds_need_a_limit() -> None:
    with pytest.raises(UniRLError, match=r"run.anneal_over is seconds and run.max_seconds"):
        RunConfig(anneal_over="seconds")
    assert RunConfig(max_seconds=9.0).horizon == Horizon(1_000_000)
    both = RunConfig(max_seconds=9.0, anneal_over="seconds")
    assert both.horizon == Horizon(1_000_000, 9.0)


def test_a_run_anneals_over_its_seconds_and_saves_them(tmp_path: Path) -> None:
    plan = unirl.make_plan(
        "impala",
        **{
            "policy.hidden": (8,),
            "runner.kind": "inline",
            "run.total_steps": 100_000_000,
            "run.max_seconds": 1.5,
            "run.anneal_over": "seconds",
            "run.log_seconds": 0.0,
            "learner.optimizer.lr": 1e-3,
            "learner.optimizer.lr_schedule": "linear",
            "env.id": "CartPole-v1",
        },
    )
    unirl.run(plan, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rates = [row["losses/learning_rate"] for row in rows if "losses/learning_rate" in row]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.8e-3
    assert rates[-1] < 0.2e-3
    learner = load_checkpoint(tmp_path / "run").state["counters"]
    assert 1.0 < learner["seconds"] < 10.0
