"""Schedules over seconds, from the setting to the step size, over a resume too."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import unirl
from unirl.errors import UniRLError

LR = 1e-3
SETTINGS: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "policy.hidden": (8,),
    "runner.kind": "inline",
    "run.total_steps": 100_000_000,
    "run.max_seconds": 1.0,
    "run.anneal_over": "seconds",
    "run.log_seconds": 0.0,
    "learner.optimizer.lr": LR,
    "learner.optimizer.lr_schedule": "linear",
}


def rows(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [row for row in found if "losses/learning_rate" in row]


def test_step_sizes_follow_the_training_time_and_continue_at_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    unirl.run(unirl.make_plan("impala", **SETTINGS), folder, console=False)
    first = rows(folder)
    twice = unirl.make_plan("impala", **SETTINGS | {"run.max_seconds": 2.0})
    unirl.run(twice, folder, resume=folder, console=False)
    second = rows(folder)[len(first) :]
    for some, begin, end in ((first, 0.0, 1.0), (second, 1.0, 2.0)):
        assert some
        for before, row in pairwise([{"time/seconds": begin}, *some]):
            # An update reads the clock when it begins: after the last row, before its own.
            share = row["losses/learning_rate"] / LR
            assert 1 - row["time/seconds"] / end - 1e-6 <= share
            assert share <= max(0.0, 1 - before["time/seconds"] / end) + 1e-6
    assert second[0]["losses/learning_rate"] <= LR / 2  # half of two seconds was over


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("impala", {"learner.optimizer.lr_schedule": "constant"}),
        ("ondevice", {"env.id": "torch/Cartpole", "learner.optimizer.lr_schedule": "adaptive"}),
        ("grpo", {"model.path": "tiny", "task.name": "reverse"}),  # its step size is constant
    ],
)
def test_nothing_that_falls_is_refused(recipe: str, settings: dict[str, Any]) -> None:
    run = {"run.max_seconds": 5.0, "run.anneal_over": "seconds"}
    with pytest.raises(UniRLError, match=r"run.anneal_over is seconds and has no effect"):
        unirl.make_plan(recipe, **settings, **run)
    with pytest.raises(UniRLError, match=r"run.anneal_from is 0.5 and has no effect"):
        unirl.make_plan(recipe, **settings, **{"run.anneal_from": 0.5})


def test_step_sizes_stay_up_until_they_fall(tmp_path: Path) -> None:
    late = {
        "run.anneal_over": "steps", "run.max_seconds": None, "run.anneal_from": 0.6,
        "run.total_steps": 20 * 640,
    }  # fmt: skip
    plan = unirl.make_plan("impala", **SETTINGS | late)
    unirl.run(plan, tmp_path / "run", console=False)
    shares = []
    for row in rows(tmp_path / "run"):
        shares.append(min(1.0, max(0.0, 1 - row["step"] / late["run.total_steps"]) / 0.4))
        assert row["losses/learning_rate"] == pytest.approx(LR * shares[-1])
    assert 1.0 in shares and any(0 < share < 1 for share in shares)  # before the bend and after


class Clockless:
    """A learner that cannot be given the time: `record_training_seconds` is missing."""

    def __init__(self, learner: Any) -> None:
        for name in ("step", "weights", "state_dict", "load_state_dict", "recent_returns"):
            setattr(self, name, getattr(learner, name))
        self.version, self.num_steps = learner.version, learner.num_steps


def test_a_learner_that_cannot_be_given_the_time_is_refused(tmp_path: Path) -> None:
    plan = unirl.make_plan("impala", **SETTINGS)
    clockless = plan.with_learner(make=lambda context: Clockless(plan.learner.make(context)))
    with pytest.raises(UniRLError, match=r"Clockless has no method record_training_seconds"):
        unirl.run(clockless, tmp_path / "run", console=False)
