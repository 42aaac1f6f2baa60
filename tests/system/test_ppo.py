"""PPO, synchronous and not: trainings of seconds with a threshold, exact through a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from unirl.core.tree import flatten
from unirl.errors import UniRLError
from unirl.storage.checkpoint import load_checkpoint

ACTOR: dict[str, Any] = {"actor.num_envs": 32, "actor.unroll_length": 32}
SAMPLER: dict[str, Any] = {
    "sampler.num_workers": 1,
    "sampler.num_envs": 32,
    "sampler.unroll_length": 32,
    "queue.batch_size": 1,
}
CARTPOLE: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "learner.gamma": 0.98,
    "learner.optimizer.lr": 1e-3,
    "runner.learner_threads": 1,
    "run.total_steps": 600_000,
    "run.max_seconds": 200.0,
}


def train(run_dir: Path, recipe: str, **overrides: Any) -> unirl.RunResult:
    return unirl.run(unirl.make_plan(recipe, **overrides), run_dir, console=False)


def test_ppo_solves_cartpole(tmp_path: Path) -> None:
    settings = {**CARTPOLE, **ACTOR, "run.target_return": 490.0}
    result = train(tmp_path / "run", "ppo", **settings)
    assert result.reason == "target_return"
    assert result.scalars["staleness/max"] == 0 and result.scalars["losses/behaviour_kl"] < 1e-7
    plan = unirl.make_plan("ppo", **settings)
    assert plan.learner.make_evaluator is not None and result.checkpoint is not None
    model = flatten(load_checkpoint(result.checkpoint).model)
    assert plan.learner.make_evaluator(7).evaluate(model, 50).mean >= 475


@pytest.mark.parametrize(
    "how",
    [
        {"runner.kind": "inline", "queue.max_staleness": 3},
        {
            "runner.kind": "processes",
            "queue.max_staleness": 2,
            "learner.epochs": 4,
            "run.target_return": 200.0,
        },
    ],
    ids=["inline", "processes"],
)
def test_appo_learns_cartpole_from_samples_that_lag(tmp_path: Path, how: dict[str, Any]) -> None:
    settings = {**CARTPOLE, **SAMPLER, "run.target_return": 300.0, **how}
    result = train(tmp_path / "run", "appo", **settings)
    assert result.reason == "target_return"
    assert 0 < result.scalars["staleness/max"] <= how["queue.max_staleness"]


MEMORY: dict[str, Any] = {
    "env.id": "unirl/RecallCue-v0",
    "env.kwargs": {"length": 8},
    "actor.num_envs": 32,
    "actor.unroll_length": 12,
    "policy.core_size": 32,
    "policy.hidden": (32,),
    "learner.optimizer.lr": 3e-3,
    "learner.gamma": 0.95,
    "runner.learner_threads": 1,
    "run.total_steps": 200_000,
    "run.target_return": 0.9,
    "run.target_window": 200,
}


@pytest.mark.parametrize("core", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_a_recurrent_policy_remembers_the_cue(tmp_path: Path, core: str) -> None:
    result = train(tmp_path / "run", "ppo", **MEMORY, **{"policy.core": core})
    assert result.reason == "target_return"


SMALL_ACTOR = {"actor.num_envs": 4, "actor.num_actors": 2, "actor.unroll_length": 8}
SMALL_SAMPLER = {"sampler.num_workers": 1, "sampler.num_envs": 4, "sampler.unroll_length": 8}
SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "policy.hidden": (16,),
    "queue.batch_size": 2,
    "runner.kind": "inline",
    "run.log_seconds": 0.0,
    "run.checkpoint_steps": 140,
}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"learner.value_clip": 0.2}),
    "ppo, lstm, adaptive step size": (
        "ppo",
        {
            "policy.core": "lstm",
            "policy.core_size": 8,
            "learner.optimizer.lr_schedule": "adaptive",
            "learner.stop_kl": 0.01,
        },
    ),
    "appo, bfloat16": (
        "appo",
        {
            "policy.compute_dtype": "bfloat16",
            "policy.normalize_obs": True,
            "queue.max_staleness": 2,
            "learner.entropy_schedule": "linear",
        },
    ),
    "impala with a running scale": ("impala", {"learner.normalize_advantage": True}),
}


def small(recipe: str) -> dict[str, Any]:
    """Few environments, where the recipe has them."""
    return dict(SMALL_SAMPLER if recipe == "appo" else SMALL_ACTOR)


def everything(
    run_dir: Path, variant: str, total_steps: int, resume: Path | None = None, **more: Any
) -> dict[str, torch.Tensor]:
    """Train for so many of 640 steps and return all tensors of the last checkpoint."""
    recipe, settings = EXACT[variant]
    settings = {**SMALL, **small(recipe), **settings, "run.total_steps": 640, **more}
    plan = unirl.make_plan(recipe, **settings)
    # Schedules end where they did: only the run is cut short.
    plan = replace(plan, run=replace(plan.run, total_steps=total_steps))
    result = unirl.run(plan, run_dir, resume=resume, console=False)
    assert result.checkpoint is not None
    checkpoint = load_checkpoint(result.checkpoint)
    trees = {"model": checkpoint.model, "optimizer": checkpoint.optimizer}
    rate = torch.tensor(result.scalars["losses/learning_rate"], dtype=torch.float64)
    return {**flatten(trees), "learning_rate": rate}


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("variant", EXACT)
def test_runs_repeat_and_resume_bit_for_bit(tmp_path: Path, variant: str) -> None:
    whole = everything(tmp_path / "whole", variant, 640)
    # Ends where the whole run also makes a checkpoint: at the first update past 280 steps.
    part = everything(tmp_path / "parts", variant, 280)
    resumed = everything(tmp_path / "parts", variant, 640, resume=tmp_path / "parts")
    assert different(whole, resumed) == []
    other = everything(tmp_path / "other", variant, 280, **{"run.seed": 2})
    assert "model/value_head.weight" in different(part, other)


@pytest.mark.parametrize(
    ("recipe", "wrong", "said"),
    [
        ("ppo", {"learner.policy_clip": 0.0}, "policy_clip"),
        ("appo", {"learner.value_clip": -1.0}, "value_clip"),
        (
            "ppo",
            {"learner.minibatches": 3},
            "batch of 1024 steps does not split into 3 minibatches",
        ),
        (
            "ppo",
            {"learner.minibatches": 3, "policy.core": "gru"},
            "batch of 8 environments does not split into 3 minibatches",
        ),
        (
            "appo",
            {"learner.minibatches": 7, "sampler.num_envs": 4},
            r"sampler.num_envs \* queue.batch_size \* sampler.unroll_length",
        ),
        (
            "ppo",
            {"learner.optimizer.lr_schedule": "adaptive", "learner.optimizer.warmup_steps": 9},
            "warmup_steps is 9 and has no effect",
        ),
        ("ppo", {"learner.stop_kl": 0.1, "learner.epochs": 1}, "stop_kl is 0.1 and has no effect"),
        ("ppo", {"learner.optimizer.target_kl": 0.0}, "target_kl"),
        (
            "appo",
            {
                "learner.optimizer.lr_schedule": "adaptive",
                "learner.epochs": 1,
                "learner.minibatches": 1,
            },
            "learner.epochs",
        ),
        ("appo", {"sampler.num_workers": 9}, "share"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_refused_in_three_parts(
    recipe: str, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(UniRLError, match=said) as error:
        unirl.make_plan(recipe, **wrong)
    assert len(error.value.parts) == 3


@pytest.mark.parametrize("recipe", ["ppo", "impala"])
def test_one_environment_is_enough_for_many_minibatches(tmp_path: Path, recipe: str) -> None:
    # Steps are drawn from anywhere: the settings of PPO's paper for one environment.
    settings = {"env.id": "CartPole-v1", "actor.num_envs": 1, "actor.unroll_length": 256}
    settings |= {"learner.minibatches": 32, "learner.epochs": 2, "run.total_steps": 512}
    settings |= {"queue.batch_size": 1, "learner.policy_clip": 0.2, "runner.kind": "inline"}
    result = unirl.run(unirl.make_plan(recipe, **settings), tmp_path / "run", console=False)
    assert result.reason == "total_steps" and result.version >= 2


@pytest.mark.parametrize("recipe", ["ppo", "appo"])
def test_every_metric_of_a_run_has_a_row_in_metrics_md(tmp_path: Path, recipe: str) -> None:
    settings = {**SMALL, **small(recipe), "learner.stop_kl": 1.0, "run.total_steps": 1000}
    scalars = train(tmp_path / "run", recipe, **settings).scalars
    document = (Path(unirl.__file__).resolve().parents[1] / "docs" / "metrics.md").read_text()
    losses = [name for name in scalars if name.startswith("losses/")]
    assert {"losses/clip_fraction", "losses/explained_variance", "losses/epochs"} <= set(losses)
    assert not [name for name in losses if f"| `{name}` |" not in document]
