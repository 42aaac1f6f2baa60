"""Real trainings of seconds with a threshold: each fails when something that matters is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unirl


def train(tmp_path: Path, **overrides: Any) -> unirl.RunResult:
    return unirl.run(unirl.make_plan("impala", **overrides), tmp_path / "run", console=False)


CARTPOLE: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 32,
    "actor.unroll_length": 16,
    "learner.gamma": 0.98,
    "learner.lambda_": 0.95,
    "learner.normalize_reward": True,
    "learner.optimizer.lr": 3e-3,
    "run.total_steps": 600_000,
    "run.target_return": 300.0,
}


@pytest.mark.parametrize(
    "how",
    [
        {"runner.kind": "inline", "queue.max_staleness": 0},
        {"runner.kind": "inline", "queue.max_staleness": 3},
        {"runner.kind": "processes", "queue.max_staleness": 1, "run.target_return": 200.0},
        {
            "runner.kind": "processes",
            "queue.max_staleness": 2,
            "queue.window": None,
            "actor.num_actors": 2,
            "run.target_return": 200.0,
        },
    ],
    ids=["inline", "inline, three updates old", "a process", "two processes, any order"],
)
def test_impala_learns_cartpole(tmp_path: Path, how: dict[str, Any]) -> None:
    result = train(tmp_path, **{**CARTPOLE, **how})
    assert result.reason == "target_return"
    assert result.scalars["staleness/max"] <= how["queue.max_staleness"]


MEMORY: dict[str, Any] = {
    "env.id": "unirl/RecallCue-v0",
    "env.kwargs": {"length": 8},
    "actor.num_envs": 32,
    "actor.unroll_length": 12,
    "policy.core_size": 32,
    "policy.hidden": (32,),
    "learner.optimizer.lr": 5e-3,
    "learner.gamma": 0.95,
    "run.total_steps": 200_000,
    "run.target_return": 0.9,
    "run.target_window": 200,
}


@pytest.mark.parametrize("core", [pytest.param("lstm", marks=pytest.mark.slow), "gru"])
def test_a_recurrent_policy_remembers_the_cue(tmp_path: Path, core: str) -> None:
    assert train(tmp_path, **MEMORY, **{"policy.core": core}).reason == "target_return"


def test_a_policy_without_memory_cannot(tmp_path: Path) -> None:
    result = train(tmp_path, **{**MEMORY, "run.total_steps": 60_000})
    assert result.reason == "total_steps"
    assert result.scalars["charts/episodic_return"] < 0.7
