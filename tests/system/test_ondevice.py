"""Training on a device: simulator, policy and learner in one memory, one wait per update."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from tests.actors.clock_sim import ClockSim
from unirl.actors.device import DeviceActor, device_spec
from unirl.bench.host_reads import CountHostReads
from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext
from unirl.core.sample import Batch, Slot
from unirl.core.tree import flatten
from unirl.errors import UniRLError
from unirl.policy import Policy
from unirl.storage.checkpoint import load_checkpoint
from unirl.transports.local import LocalWeightStore

CARTPOLE: dict[str, Any] = {
    "env.id": "torch/Cartpole",
    "sim.num_envs": 512,
    "sim.unroll_length": 16,
    "policy.hidden": (32, 32),
    "learner.epochs": 8,
    "learner.minibatches": 1,
    "learner.optimizer.target_kl": 0.008,
    "learner.reward_scale": 0.1,
    "runner.learner_threads": 1,
    "run.total_steps": 2_000_000,
    "run.checkpoint_steps": 10_000_000,
    "run.max_seconds": 200.0,
}
SMALL = {**CARTPOLE, "sim.num_envs": 32, "sim.unroll_length": 8, "learner.epochs": 2}


def train(run_dir: Path, **overrides: Any) -> unirl.RunResult:
    return unirl.run(unirl.make_plan("ondevice", **overrides), run_dir, console=False)


def test_cartpole_is_solved(tmp_path: Path) -> None:
    result = train(tmp_path / "run", **CARTPOLE, **{"run.target_return": 480.0})
    assert result.reason == "target_return"
    assert result.scalars["staleness/max"] == 0
    plan = unirl.make_plan("ondevice", **CARTPOLE)
    assert plan.learner.make_evaluator is not None and result.checkpoint is not None
    model = flatten(load_checkpoint(result.checkpoint).model)
    assert plan.learner.make_evaluator(7).evaluate(model, 32).mean >= 470


@pytest.mark.parametrize("normalize", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_samples_that_lag_by_one_update_teach_as_well(tmp_path: Path, normalize: bool) -> None:
    lagging = {"queue.max_staleness": 1, "learner.normalize_value": normalize}
    result = train(tmp_path / "run", **CARTPOLE, **lagging, **{"run.target_return": 300.0})
    assert result.reason == "target_return"
    # The very first sample cannot lag.
    assert result.scalars["staleness/max"] == 1 and result.scalars["staleness/mean"] > 0.5
    assert result.scalars["losses/behaviour_kl"] > 0


def test_a_critic_that_sees_more_trains(tmp_path: Path) -> None:
    settings = {**SMALL, "env.id": "torch/PointMass", "run.total_steps": 4 * 32 * 8}
    result = train(tmp_path / "run", **settings)
    assert result.reason == "total_steps" and result.num_steps == 4 * 32 * 8


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    settings = {**SMALL, "run.checkpoint_steps": 32 * 8 * 5, "run.total_steps": 32 * 8 * 10}
    whole = train(tmp_path / "whole", **settings)
    train(tmp_path / "part", **{**settings, "run.total_steps": 32 * 8 * 5})
    plan, part = unirl.make_plan("ondevice", **settings), tmp_path / "part"
    resumed = unirl.run(plan, part, resume=part, console=False)
    assert whole.checkpoint is not None and resumed.checkpoint is not None
    first, second = (flatten(load_checkpoint(r.checkpoint).model) for r in (whole, resumed))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(
    "settings",
    [{}, {"learner.minibatches": 4}, {"queue.max_staleness": 1}, {"env.id": "torch/PointMass"}],
    ids=["plain", "minibatches", "lagging", "critic"],
)
def test_the_host_reads_from_the_device_once_per_update(settings: dict[str, Any]) -> None:
    plan = unirl.make_plan("ondevice", **{**SMALL, **settings})
    weights, learner = LocalWeightStore(), plan.learner.make(LearnerContext(plan.learner_seed(0)))
    weights.publish(learner.weights(), 0)
    actor: Any = plan.pools[0].make_actor(ActorContext(0, 1, weights))
    slot = Slot(0, 0, plan.learner.spec.allocate())
    for expected in (1, 2, 3):
        if expected == 1:
            reads = CountHostReads()
        with reads:
            actor.produce(slot)
            learner.step(Batch([slot], learner.version))
            weights.publish(learner.weights(), learner.version)
        assert reads.names == ["tolist"] * expected


def broken_actor(context: ActorContext, *, policy: Any, sim: Any) -> DeviceActor:
    """An actor over a simulator that loses one state."""
    env = ClockSim(num_envs=4, length=6, broken=(3, 0))
    module = Policy(
        env.spec.observation_space, env.spec.action_space, policy, seed=context.seed % 2**31
    )
    return DeviceActor(env, module, context.weights, sim=sim, gamma=0.9, seed=context.seed)


@pytest.mark.parametrize(("allowed", "stops"), [(1, False), (0, True)])
def test_lost_states_are_counted_and_the_run_stops_beyond_a_limit(
    tmp_path: Path, allowed: int, stops: bool
) -> None:
    settings = {**SMALL, "sim.num_envs": 4, "learner.max_nan_states": allowed}
    settings |= {"run.total_steps": 4 * 8 * 3}
    plan = unirl.make_plan("ondevice", **settings)
    config = plan.config
    env = ClockSim(num_envs=4, length=6)
    # The clock has other spaces than the task: the learner is made for them.
    spaces = (env.spec.observation_space, env.spec.action_space)
    make_learner: Any = plan.learner.make
    spec = device_spec(env.spec, 8, env.counters())
    make_actor = partial(broken_actor, policy=config.policy, sim=config.sim)
    plan = plan.with_pool(make_actor=make_actor).with_learner(
        make=partial(make_learner, spaces=spaces, spec=spec), spec=spec, make_evaluator=None
    )
    if stops:
        with pytest.raises(UniRLError, match=r"1 environments reached a state that is not finite"):
            unirl.run(plan, tmp_path / "run", console=False)
    else:
        result = unirl.run(plan, tmp_path / "run", console=False)
        assert result.scalars["env/nan_states"] == 1


def test_a_run_that_lost_too_many_states_keeps_what_it_learned(tmp_path: Path) -> None:
    plan = unirl.make_plan("ondevice", **SMALL)
    plan = plan.with_learner(make=partial(fails_later, make=plan.learner.make))
    with pytest.raises(UniRLError, match="not finite"):
        unirl.run(plan, tmp_path / "run", console=False)
    assert load_checkpoint(tmp_path / "run").state["version"] == 3


def fails_later(context: Any, *, make: Any) -> Any:
    """A learner whose fourth batch counts lost states."""
    learner = make(context)
    step = learner.step

    def next_step(batch: Batch) -> Any:
        if learner.version == 3:
            batch.slots[0].data["counter"]["nan_states"].fill_(10_000)
        return step(batch)

    learner.step = next_step
    return learner


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"runner.kind": "processes"}, "runner.kind must be inline"),
        ({"sim.num_simulators": 2}, "it has one simulator"),
        ({"runner.kind": "ray", "sim.num_simulators": 2}, "2 actors share 1 slots"),
        ({"policy.core": "lstm", "policy.shared_torso": True}, "without memory"),
        ({"env.id": "torch/Cartpol"}, 'Did you mean "torch/Cartpole"'),
        ({"env.id": "CartPole-v1"}, "is not a simulator on a device"),
        ({"sim.device": "cuda:99"}, "CUDA"),
        ({"sim.num_envs": 0}, "sim.num_envs"),
        ({"learner.minibatches": 5}, "does not split into 5 minibatches"),
        ({"policy.critic_group": "critic"}, "critic_group"),
        ({"learner.device": "cuda"}, "simulator and learner share one device"),
    ],
)
def test_what_cannot_run_is_refused_in_three_parts(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(UniRLError, match=match) as caught:
        unirl.make_plan("ondevice", **{**SMALL, **settings})
    assert len(caught.value.parts) == 3
