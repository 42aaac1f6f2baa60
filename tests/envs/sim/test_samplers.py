"""Simulators under the samplers of the host and the evaluator: one id everywhere."""

from __future__ import annotations

from typing import Any

import pytest

import unirl
from unirl.actors.evaluate import make_evaluator
from unirl.envs.config import EnvConfig
from unirl.envs.make import spaces
from unirl.policy import Policy, PolicyConfig
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import TrainLoop
from unirl.runners.processes import ProcessesRunner


class After:
    """A hook that ends the run after some updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def after_update(self, loop: TrainLoop) -> None:
        if loop.learner.version >= self.updates:
            loop.stop("test")

    def at_end(self, loop: TrainLoop) -> None:
        pass


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("task", ["torch/Cartpole", "torch/CartPole-v1", "torch/PointMass"])
def test_the_vector_sampler_trains_on_it(task: str, core: str) -> None:
    settings: dict[str, Any] = {
        "env.id": task,
        "actor.num_envs": 16,
        "actor.num_actors": 2,
        "actor.unroll_length": 16,
        "policy.hidden": (16,),
        "policy.core": core,
        "queue.batch_size": 2,
        "run.total_steps": 1_000_000,
    }
    runner = InlineRunner(unirl.make_plan("impala", **settings))
    runner.run([After(5)])
    assert runner.loop.learner.version == 5


def test_environment_workers_step_it_in_shared_memory() -> None:
    settings: dict[str, Any] = {
        "env.id": "torch/Cartpole",
        "policy.hidden": (16,),
        "sampler.num_workers": 1,
        "sampler.num_groups": 2,
        "sampler.num_envs": 8,
        "sampler.unroll_length": 8,
        "queue.batch_size": 2,
        "queue.max_staleness": 3,
        "run.total_steps": 10_000_000,
    }
    runner = ProcessesRunner(unirl.make_plan("appo", **settings))
    runner.run([After(5)])
    assert runner.loop.learner.version >= 5
    assert runner.num_restarts == 0


@pytest.mark.parametrize("task", ["torch/Pendulum", "torch/PointMass"])
def test_the_evaluator_plays_whole_episodes(task: str) -> None:
    config, policy = EnvConfig(id=task, max_episode_steps=20), PolicyConfig(hidden=(8,))
    weights = Policy(*spaces(config), policy, seed=0).weights()
    result = make_evaluator(config, policy, 1, num_envs=2).evaluate(weights, 6)
    assert result.lengths == [20] * 6
    assert len(set(result.returns)) == 6
