"""How a run ends when someone presses Ctrl-C, and what a folder is worth to it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import unirl
from unirl.core.learner import LearnerContext, LearnerState
from unirl.runners.plan import Plan
from unirl.storage.checkpoint import load_checkpoint

SETTINGS = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 4,
    "policy.hidden": (8,),
    "run.total_steps": 300,
}


def plan_with_signals_while_saving(num_signals: int) -> Plan:
    """A plan whose learner is interrupted while its last checkpoint is written."""
    plan = unirl.make_plan("impala", **SETTINGS)

    class Interrupted(type(plan.learner.make(LearnerContext(0)))):  # type: ignore[misc]
        def state_dict(self) -> LearnerState:
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGINT)
            state: LearnerState = super().state_dict()
            return state

    def make_learner(context: LearnerContext) -> Any:
        learner = plan.learner.make(context)
        learner.__class__ = Interrupted
        return learner

    return plan.with_learner(make=make_learner)


def test_one_ctrl_c_during_the_last_checkpoint_does_not_cost_it(tmp_path: Path) -> None:
    result = unirl.run(plan_with_signals_while_saving(1), tmp_path / "run", console=False)
    assert result.reason == "total_steps"
    assert load_checkpoint(tmp_path / "run").step == result.num_steps >= 300


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        unirl.run(plan_with_signals_while_saving(2), tmp_path / "run", console=False)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_checkpoint_may_be_continued_in_a_new_folder(tmp_path: Path) -> None:
    unirl.run(unirl.make_plan("impala", **SETTINGS), tmp_path / "a", console=False)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    more = unirl.make_plan("impala", **{**SETTINGS, "run.total_steps": 900})
    result = unirl.run(more, tmp_path / "b", resume=tmp_path / "a", console=False)
    assert result.num_steps >= 900 and load_checkpoint(tmp_path / "b").step == result.num_steps
    assert before == {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
