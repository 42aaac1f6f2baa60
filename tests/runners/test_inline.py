"""The inline runner is reproducible bit for bit, through interruption and resume too."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from tests.toy_envs import FAULT
from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext, LearnerState
from unirl.core.sample import Batch, Slot
from unirl.core.tree import flatten
from unirl.core.weights import Weights
from unirl.errors import ActorFailed, DiscardSlot, UniRLError
from unirl.metrics.metrics import Metrics
from unirl.runners.hooks import CheckpointHook
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import TrainLoop
from unirl.runners.state import restore
from unirl.storage.checkpoint import load_checkpoint

SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 4,
    "actor.num_actors": 2,
    "actor.unroll_length": 8,
    "policy.hidden": (16,),
    "queue.batch_size": 2,
    "run.log_seconds": 0.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "on-policy": {"queue.max_staleness": 0},
    "two updates old": {"queue.max_staleness": 2},
    "lstm": {"queue.max_staleness": 1, "policy.core": "lstm", "policy.core_size": 8},
    "bfloat16 with all normalisers": {
        "queue.max_staleness": 1,
        "policy.compute_dtype": "bfloat16",
        "policy.normalize_obs": True,
        "learner.normalize_reward": True,
        "learner.optimizer.name": "rmsprop",
        "learner.optimizer.lr_schedule": "linear",
        "learner.minibatches": 2,
        "learner.epochs": 2,
    },
}


def train(
    run_dir: Path, total_steps: int, variant: str, resume: Path | None = None, **more: Any
) -> dict[str, torch.Tensor]:
    """Train and return everything a checkpoint holds, by name."""
    settings = {
        **SMALL,
        **VARIANTS[variant],
        "run.total_steps": 2000,
        "run.checkpoint_steps": 350,
        **more,
    }
    plan = unirl.make_plan("impala", **settings)
    plan = type(plan)(
        **{
            **plan.__dict__,
            "run": type(plan.run)(**{**plan.run.__dict__, "total_steps": total_steps}),
        }
    )
    result = unirl.run(plan, run_dir, resume=resume, console=False)
    assert result.checkpoint is not None
    checkpoint = load_checkpoint(result.checkpoint)
    trees = {
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
        "samples": checkpoint.samples or {},
    }
    return flatten({name: tree for name, tree in trees.items() if tree})


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(
    tmp_path: Path, variant: str
) -> None:
    first = train(tmp_path / "a", 750, variant)
    assert_equal(first, train(tmp_path / "b", 750, variant))
    other = train(tmp_path / "c", 750, variant, **{"run.seed": 2})
    assert any(
        not torch.equal(first[name], other[name]) for name in first if name.startswith("model")
    )


def test_every_actor_has_a_seed_of_its_own() -> None:
    plan, seeds = unirl.make_plan("impala", **{**SMALL, "run.total_steps": 50}), []

    def make_actor(context: ActorContext) -> Any:
        seeds.append(context.seed)
        return plan.pools[0].make_actor(context)

    InlineRunner(plan.with_pool(make_actor=make_actor)).run([])
    assert len(seeds) == len(set(seeds)) == SMALL["actor.num_actors"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, variant: str
) -> None:
    whole = train(tmp_path / "whole", 1500, variant)
    # Ends where the whole run also makes a checkpoint: at the first update past 700 steps.
    train(tmp_path / "parts", 700, variant)
    resumed = train(tmp_path / "parts", 1500, variant, resume=tmp_path / "parts")
    assert_equal(whole, resumed)


def test_max_staleness_is_the_age_of_every_inline_sample(tmp_path: Path) -> None:
    plan = unirl.make_plan("impala", **{**SMALL, "queue.max_staleness": 3, "run.total_steps": 2000})
    result = unirl.run(plan, tmp_path / "run", console=False)
    assert result.scalars["staleness/max"] == 3.0


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_max_staleness_0_is_exactly_on_policy(tmp_path: Path, core: str) -> None:
    settings = {**SMALL, "queue.max_staleness": 0, "policy.core": core, "run.total_steps": 1500}
    unirl.run(unirl.make_plan("impala", **settings), tmp_path / "run", console=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    # The learner finds the log-probabilities of the actor again, in every update.
    assert len(rows) > 20
    assert max(abs(row["losses/approx_kl"]) for row in rows if "losses/approx_kl" in row) < 1e-7
    stale = {**settings, "queue.max_staleness": 3}
    unirl.run(unirl.make_plan("impala", **stale), tmp_path / "stale", console=False)
    rows = [json.loads(line) for line in (tmp_path / "stale" / "metrics.jsonl").open()]
    assert max(row["losses/approx_kl"] for row in rows if "losses/approx_kl" in row) > 1e-5


@pytest.mark.parametrize(
    "more",
    [{}, {"run.log_seconds": 1000.0, "run.eval_steps": 1, "run.eval_episodes": 1}],
    ids=["by the log", "by the evaluation"],
)
def test_a_training_that_diverges_stops_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    settings = {**SMALL, "run.checkpoint_steps": 300, "run.total_steps": 100_000, **more}
    plan = unirl.make_plan("impala", **settings)

    class Poisoned(type(plan.learner.make(LearnerContext(0)))):  # type: ignore[misc]
        def step(self, batch: Batch) -> Metrics:
            if self.version == 20:
                batch.slots[0].data["reward"].fill_(float("inf"))
            metrics: Metrics = super().step(batch)
            return metrics

    def make_learner(context: LearnerContext) -> Any:
        learner = plan.learner.make(context)
        learner.__class__ = Poisoned
        return learner

    with pytest.raises(UniRLError, match="diverged by update 21"):
        unirl.run(plan.with_learner(make=make_learner), tmp_path / "run", console=False)
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.state["version"] <= 20


def test_a_resume_of_another_environment_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", 300, "on-policy")
    with pytest.raises(UniRLError, match="another env") as error:
        train(
            tmp_path / "run", 600, "on-policy", resume=tmp_path / "run", **{"env.id": "Acrobot-v1"}
        )
    assert "CartPole-v1" in str(error.value) and "Acrobot-v1" in str(error.value)


def test_a_failing_environment_is_restarted_and_then_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        **SMALL,
        **FAULT,
        "env.kwargs": {"raise_at": 100},
        "runner.max_restarts": 2,
    }
    plan = unirl.make_plan("impala", **settings)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(UniRLError, match="restarted 2 of 2") as error,
    ):
        unirl.run(plan, tmp_path / "run", console=False)
    assert "RuntimeError" in error.value.what
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()
    # What was learned before is saved: the remedy, to resume, can be followed.
    assert load_checkpoint(tmp_path / "run").state["version"] > 0


def test_a_nan_observation_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    settings = {**SMALL, **FAULT, "env.kwargs": {"nan_at": 200}}
    with pytest.raises(ActorFailed, match="toy/Fault-v0"):
        unirl.run(unirl.make_plan("impala", **settings), tmp_path / "run", console=False)
    assert load_checkpoint(tmp_path / "run").state["version"] > 0


@pytest.mark.parametrize(
    ("key", "value"), [("learner.optimizer.name", "rmsprop"), ("learner.normalize_reward", True)]
)
def test_a_resume_with_settings_that_need_another_state_is_refused(
    tmp_path: Path, key: str, value: object
) -> None:
    train(tmp_path / "run", 300, "on-policy")
    with pytest.raises(UniRLError, match=key):
        train(tmp_path / "run", 600, "on-policy", resume=tmp_path / "run", **{key: value})


def test_a_finished_run_is_not_trained_on(tmp_path: Path) -> None:
    before = train(tmp_path / "run", 300, "on-policy")
    plan = unirl.make_plan("impala", **{**SMALL, "queue.max_staleness": 0, "run.total_steps": 300})
    runner = InlineRunner(plan)
    restore(runner.loop, load_checkpoint(tmp_path / "run"))
    runner.run([])
    weights = runner.loop.learner.weights()
    assert all(torch.equal(value, before[f"model/{name}"]) for name, value in weights.items())


def test_a_target_return_needs_a_learner_that_knows_its_episodes(tmp_path: Path) -> None:
    plan = unirl.make_plan("impala", **{**SMALL, "run.target_return": 10.0})

    class Silent:
        def __init__(self, context: LearnerContext) -> None:
            self._learner = plan.learner.make(context)
            self.version = self.num_steps = 0

        def step(self, batch: Batch) -> Metrics:
            self.version += 1
            return self._learner.step(batch)

        def weights(self) -> Weights:
            return self._learner.weights()

        def state_dict(self) -> LearnerState:
            return self._learner.state_dict()

        def load_state_dict(self, state: LearnerState) -> None:
            self._learner.load_state_dict(state)

    with pytest.raises(UniRLError, match="recent_returns"):
        unirl.run(plan.with_learner(make=Silent), tmp_path / "run", console=False)


def test_an_actor_that_always_discards_meets_a_deadline(tmp_path: Path) -> None:
    class Picky:
        def __init__(self, context: ActorContext) -> None:
            pass

        def produce(self, slot: Slot) -> None:
            raise DiscardSlot("filtered")

        def close(self) -> None:
            pass

    plan = unirl.make_plan("impala", **{**SMALL, "queue.timeout_seconds": 0.3})
    plan = plan.with_pool(make_actor=Picky)
    with pytest.raises(UniRLError, match="filtered"):
        unirl.run(plan, tmp_path / "run", console=False)


def test_a_slot_that_is_never_given_back_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    runner = InlineRunner(unirl.make_plan("impala", **{**SMALL, "queue.max_staleness": 0}))

    class Hoarder:
        def after_update(self, loop: TrainLoop) -> None:
            if loop.learner.version == 3:
                loop.queue.join().acquire(0.0)

        def at_end(self, loop: TrainLoop) -> None:
            pass

    save = CheckpointHook(tmp_path, 1_000_000, runner.restart_actors)
    with pytest.raises(ActorFailed, match="has held ticket 6"):
        runner.run([Hoarder(), save])
    assert load_checkpoint(tmp_path).state["version"] == 3


def test_a_smaller_max_staleness_on_resume_discards_what_is_too_old_and_continues(
    tmp_path: Path,
) -> None:
    train(tmp_path / "run", 600, "two updates old")
    train(
        tmp_path / "run",
        1200,
        "two updates old",
        resume=tmp_path / "run",
        **{"queue.max_staleness": 0, "queue.timeout_seconds": 5.0},
    )


def test_an_environment_that_fails_at_birth_is_restarted_and_then_named(tmp_path: Path) -> None:
    plan = unirl.make_plan("impala", **{**SMALL, "runner.max_restarts": 1})

    def stillborn(context: ActorContext) -> Any:
        raise RuntimeError("no such display")

    with pytest.raises(ActorFailed, match="no such display"):
        unirl.run(plan.with_pool(make_actor=stillborn), tmp_path / "run", console=False)
