"""Evaluation on a device: complete episodes, each with its true length, and pictures of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import forked
from tests.envs.sim.countdown import Countdown
from unirl.actors.evaluate import make_evaluator
from unirl.actors.evaluate_device import DeviceEvaluator
from unirl.core.evaluator import WatchableEvaluator
from unirl.core.learner import LearnerContext
from unirl.envs.config import EnvConfig
from unirl.envs.device import DeviceEnv
from unirl.envs.sim.make import make_device_env
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig
from unirl.recipes import ondevice

CPU, SMALL = torch.device("cpu"), PolicyConfig(hidden=(8,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights_for(env: DeviceEnv, policy: PolicyConfig = SMALL) -> dict[str, torch.Tensor]:
    return Policy(env.spec.observation_space, env.spec.action_space, policy, seed=0).weights()


def player_of(task: str, **fields: Any) -> tuple[DeviceEvaluator, dict[str, torch.Tensor]]:
    make_env = partial(make_device_env, EnvConfig(task, **fields), device=CPU)
    return DeviceEvaluator(make_env, SMALL, 1), weights_for(make_env(1))


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("num_episodes", [1, 4, 7])
def test_returns_and_lengths_count_every_step_and_no_filler(
    autoreset: Any, num_episodes: int
) -> None:
    # Rewards are 1, 2, 3: an episode of three steps is worth 6.
    make_env = partial(Countdown, terminate_after=3, autoreset=autoreset)
    evaluator = DeviceEvaluator(make_env, SMALL, 1, num_envs=2)
    result = evaluator.evaluate(weights_for(make_env(1)), num_episodes)
    assert (result.returns, result.lengths) == ([6.0] * num_episodes, [3] * num_episodes)


def greedy(env: DeviceEnv, action: float) -> dict[str, torch.Tensor]:
    """Weights whose most probable action is the same everywhere."""
    weights = {name: torch.zeros_like(value) for name, value in weights_for(env).items()}
    (bias,) = (name for name in weights if name.startswith("action_head") and "bias" in name)
    weights[bias].fill_(action)
    return weights


def test_an_episode_whose_state_was_lost_counts_for_nothing() -> None:
    # Sampled actions break a state now and then: rows begin again, from the first reward on.
    make_env = partial(Countdown, truncate_after=3)
    evaluator = DeviceEvaluator(make_env, SMALL, 1, num_envs=4)
    result = evaluator.evaluate(weights_for(make_env(1)), 8)
    assert (result.returns, result.lengths) == ([6.0] * 8, [3] * 8)


def test_a_state_that_is_always_lost_ends_the_evaluation_with_a_reason() -> None:
    make_env = partial(Countdown, truncate_after=5)
    evaluator = DeviceEvaluator(make_env, SMALL, 1)
    with pytest.raises(UniRLError, match="were not finite") as error:
        evaluator.evaluate(greedy(make_env(1), 0.9), 3, deterministic=True)
    assert len(error.value.parts) == 3 and error.value.rule.startswith("0 of 3")


def test_returns_of_cart_poles_are_their_lengths_up_to_the_true_limit() -> None:
    evaluator, weights = player_of("torch/CartPole-v1")
    result = evaluator.evaluate(weights, 40)
    # Gymnasium's gives 1 for each step.
    assert result.returns == result.lengths and min(result.lengths) >= 8
    assert len(set(result.lengths)) > 5
    evaluator, weights = player_of("torch/Pendulum")
    assert evaluator.evaluate(weights, 3).lengths == [200] * 3


def test_the_same_seed_plays_the_same_episodes_again() -> None:
    evaluator, weights = player_of("torch/CartPole-v1", max_episode_steps=30)
    make_env = partial(make_device_env, EnvConfig("torch/CartPole-v1"), device=CPU)
    first = evaluator.evaluate(weights, 20)
    assert evaluator.evaluate(weights, 20) == first
    assert DeviceEvaluator(make_env, SMALL, 2).evaluate(weights, 20) != first


def test_memory_restarts_with_each_episode() -> None:
    policy = PolicyConfig(hidden=(8,), core="gru", core_size=8)
    env = EnvConfig("torch/Pendulum", max_episode_steps=4)
    made = make_device_env(env, 1, CPU)
    weights = {name: 3 * value for name, value in weights_for(made, policy).items()}
    alone, in_turn = (make_evaluator(env, policy, 1, num_envs=n) for n in (3, 1))
    returns = alone.evaluate(weights, 3, deterministic=True).returns
    assert len(set(returns)) == 3
    assert alone.evaluate(weights, 3, deterministic=True).returns == returns
    assert in_turn.evaluate(weights, 3, deterministic=True).lengths == [4] * 3


@pytest.mark.parametrize("num_episodes", [0, -3])
def test_an_evaluation_without_episodes_is_refused(num_episodes: int) -> None:
    evaluator, weights = player_of("torch/Cartpole")
    with pytest.raises(UniRLError, match="must be >= 1"):
        evaluator.evaluate(weights, num_episodes)


def test_the_recipe_is_judged_on_complete_episodes() -> None:
    config = ondevice.Config(env=EnvConfig("torch/Cartpole", max_episode_steps=12))
    plan = ondevice.plan(config)
    assert plan.learner.make_evaluator is not None
    evaluator = plan.learner.make_evaluator(3)
    assert isinstance(evaluator, WatchableEvaluator)
    policy = plan.learner.make(LearnerContext(plan.learner_seed(0))).weights()
    assert evaluator.evaluate(policy, 5).lengths == [12] * 5


@pytest.mark.parametrize("task", ["torch/CartPole-v1", "torch/Cartpole"])
def test_carts_are_drawn_in_every_state_that_was_acted_on(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pygame", reason="Gymnasium draws carts with pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    evaluator, weights = player_of(task, max_episode_steps=6)
    frames = list(evaluator.frames(weights, num_episodes=2))
    assert evaluator.played.lengths == [6, 6] and len(frames) == 12
    assert evaluator.frames_per_second == pytest.approx(60 if task == "torch/Cartpole" else 50)
    assert all(frame.shape == (400, 600, 3) and frame.dtype == np.uint8 for frame in frames)
    assert not np.array_equal(frames[0], frames[5])
    through_host = make_evaluator(EnvConfig(task, max_episode_steps=6), SMALL, 1)
    assert np.array_equal(next(through_host.frames(weights)), frames[0])


def test_a_simulator_without_pictures_is_refused_in_three_parts() -> None:
    evaluator, weights = player_of("torch/PointMass")
    with pytest.raises(UniRLError, match="cannot be drawn") as error:
        next(evaluator.frames(weights))
    assert len(error.value.parts) == 3 and "torch/Cartpole" in error.value.remedy


def draw_worlds() -> None:
    assert "mujoco" not in sys.modules
    config, small = EnvConfig("warp/Cartpole", max_episode_steps=4), PolicyConfig(hidden=(8,))
    make = partial(make_device_env, config, device=torch.device("cpu"))
    spec = make(1).spec
    weights = Policy(spec.observation_space, spec.action_space, small, seed=0).weights()
    evaluator = DeviceEvaluator(make, small, 1)
    assert evaluator.evaluate(weights, 3).lengths == [4] * 3
    try:
        frames = list(evaluator.frames(weights))
    except UniRLError as error:
        assert len(error.parts) == 3 and "MUJOCO_GL" in error.remedy, error.parts
        print("refused")
    else:
        assert len(frames) == 4 and np.ptp(frames[0]) > 0
        print("drawn")


def test_mujoco_draws_the_worlds_of_warp(tmp_path: Path) -> None:
    for package in ("mujoco_warp", "warp"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("the warp/ tasks need it")
    # MuJoCo reads MUJOCO_GL when it is imported: a process of its own.
    output = tmp_path / "said.txt"
    process = forked.start(draw_worlds, environ={"MUJOCO_GL": "egl"}, output=output, forks=False)
    process.join(300)
    process.kill()
    assert process.exitcode == 0, output.read_text()
    # Without EGL here: said in three parts, and the evaluation worked all the same.
    assert output.read_text().split()[-1] in ("drawn", "refused")
