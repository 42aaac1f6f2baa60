"""Several pools of one learner: shares, members that come and go, and signs of life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from tests.runners.test_async_actors import SPEC as SLEEPER_SPEC
from tests.runners.test_async_actors import Noter, Sleeper
from unirl import (
    Field,
    LearnerPlan,
    Plan,
    Pool,
    QueueConfig,
    Resources,
    RunConfig,
    RunnerConfig,
    SampleSpec,
)
from unirl.core.actor import ActorContext
from unirl.core.sample import Slot
from unirl.core.weights import Weights
from unirl.errors import ActorFailed, UniRLError
from unirl.runners.loop import TrainLoop
from unirl.runners.processes import ProcessesRunner
from unirl.supervision.restarts import Restarts

SPEC = SampleSpec({"ticket": Field((1,), torch.int64, batch_axis=0)})
MIX = {
    "env.id": "CartPole-v1",
    "mix": {"CartPole-v1": 3.0, "CartPole-v0": 1.0},
    "actor.num_envs": 4,
    "actor.unroll_length": 4,
    "policy.hidden": (8,),
    "runner.learner_threads": 1,
}


class Counter:
    """An actor whose every sample is its ticket."""

    def __init__(self, context: ActorContext, *, seconds: float = 0.0) -> None:
        self.weights, self.seconds = context.weights, seconds

    def load_weights(self, weights: Weights) -> None:
        pass

    def produce(self, slot: Slot) -> None:
        time.sleep(self.seconds)
        slot.first_version = slot.last_version = self.weights.pull(self, -1)
        slot.data["ticket"][0] = slot.ticket

    def close(self) -> None:
        pass


def two_pools(kind: str, slow: float = 0.0, **queue: Any) -> Plan:
    return Plan(
        "test",
        pools=(
            Pool(Counter, "fast", share=3.0),
            Pool(partial(Counter, seconds=slow), "slow", share=1.0),
        ),
        learners=(LearnerPlan(Noter, SPEC, QueueConfig(**queue)),),
        runner=RunnerConfig(kind=kind),  # type: ignore[arg-type]
        run=RunConfig(total_steps=200),
    )


@pytest.mark.parametrize("kind", ["inline", "processes"])
@pytest.mark.parametrize("window", [1, None])
def test_a_slow_pool_keeps_its_share(kind: str, window: int | None, tmp_path: Path) -> None:
    plan = two_pools(kind, 0.005, batch_size=2, max_staleness=1, window=window)
    result = unirl.run(plan, tmp_path, console=False)
    learned = [result.scalars[f"queue/learned/{name}"] for name in ("fast", "slow")]
    assert sum(learned) == 200 and learned[0] / 200 == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_two_environments_feed_one_learner_in_their_shares(kind: str, tmp_path: Path) -> None:
    settings = {**MIX, "runner.kind": kind, "queue.batch_size": 2, "run.total_steps": 1_600}
    result = unirl.run(unirl.make_plan("impala", **settings), tmp_path, console=False)
    names = [f"queue/learned/{name}-actor" for name in ("CartPole-v1", "CartPole-v0")]
    first, second = (result.scalars[name] for name in names)
    assert first / (first + second) == pytest.approx(0.75, abs=0.02)
    assert (tmp_path / "config.toml").read_text().count("CartPole-v0") == 1


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mix": {"CartPole-v1": 0.0}}, "a share must be > 0"),
        ({"mix": {"CartPole-v0": 1.0}}, "it must be in the mix"),
        ({"mix": {"CartPole-v1": 1.0, "Acrobot-v1": 1.0}}, "equal spaces"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UniRLError, match=what) as error:
        unirl.make_plan("impala", **{**MIX, **changes})
    assert len(error.value.parts) == 3


def test_resources_that_one_machine_cannot_honour_are_said_to_be_ignored() -> None:
    plan = two_pools("processes")
    assert "ignored" not in plan.describe()
    assert "resources are ignored" in plan.with_pool(resources=Resources(gpus=1)).describe()


def test_a_pool_without_a_learner_is_refused() -> None:
    learner = LearnerPlan(Noter, SPEC)
    with pytest.raises(UniRLError, match="'rival'"):
        Plan("test", (Pool(Counter, learners=("rival",)),), (learner,))
    with pytest.raises(UniRLError, match="nothing feeds"):
        Plan("test", (), (learner,))
    with pytest.raises(UniRLError, match="least <= most"):
        Pool(Counter, count=(3, 2))
    with pytest.raises(UniRLError, match="share must be > 0"):
        Pool(Counter, share=0.0)


class Steps:
    """A hook that does one thing after the other, each as soon as its condition holds."""

    def __init__(self, *steps: tuple[Callable[[], bool], Callable[[], None]]) -> None:
        self.steps, self.deadline = list(steps), time.monotonic() + 60.0

    def after_update(self, loop: TrainLoop) -> None:
        assert time.monotonic() < self.deadline, f"{len(self.steps)} steps are left"
        if self.steps and self.steps[0][0]():
            self.steps.pop(0)[1]()
        if not self.steps:
            loop.stop("test")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def test_members_join_and_leave_while_the_run_continues() -> None:
    pool = Pool(partial(Counter, seconds=0.002), count=(1, 3))
    plan = Plan(
        "test",
        (pool,),
        (LearnerPlan(Noter, SPEC, QueueConfig(batch_size=4)),),
        runner=RunnerConfig(kind="processes"),
        run=RunConfig(total_steps=10**9),
    )
    runner = ProcessesRunner(plan)
    queue = runner.loop.queue

    def producing() -> int:
        return sum(status.num_running > 0 for status in queue.members())

    runner.run(
        [
            Steps(
                (lambda: producing() == 1, lambda: runner.resize(pool, 3)),
                (lambda: producing() == 3, lambda: runner.resize(pool, 1)),
                (lambda: len(runner.actor_pids()) == 1 and producing() == 1, lambda: None),
            )
        ]
    )
    stats = queue.stats()
    assert sum(stats.discarded.values()) == 0  # who leaves finishes what it holds
    assert stats.started == stats.learned + stats.out
    assert runner.num_restarts == 0
    with pytest.raises(UniRLError, match="allows 1 to 3"):
        runner.resize(pool, 4)


class OneStuck(Sleeper):
    """One ticket never ends; all others do."""

    async def produce(self, slot: Slot) -> None:
        if slot.ticket == 5:
            await asyncio.sleep(600.0)
        await super().produce(slot)


def test_a_group_that_never_ends_costs_itself_and_not_the_engine(tmp_path: Path) -> None:
    plan = Plan(
        "test",
        (Pool(partial(OneStuck, fault="", marks=tmp_path)),),
        (LearnerPlan(Noter, SLEEPER_SPEC, QueueConfig(batch_size=4, window=None), reissue=True),),
        runner=RunnerConfig(kind="processes", hang_seconds=1.0),
        run=RunConfig(total_steps=10**9, log_seconds=0.0),
    )
    runner = ProcessesRunner(plan)
    queue = runner.loop.queue
    runner.run([Steps((lambda: queue.stats().discarded["timeout"] == 1, lambda: None))])
    assert runner.num_restarts == 0
    stats = queue.stats()
    assert stats.discarded["actor_died"] == 0
    assert stats.started == stats.learned + sum(stats.discarded.values()) + stats.out


def test_restarts_count_within_a_window_of_time() -> None:
    restarts = Restarts(limit=2, window_seconds=0.2)
    for _ in range(3):  # one now and then is a fact of life
        restarts.count("actor 1 died", "resume")
        time.sleep(0.15)
    with pytest.raises(ActorFailed, match=r"restarted 2 of 2 times .* within 0.2 s"):
        for _ in range(3):
            restarts.count("actor 1 died", "resume")
    assert restarts.total >= 4
