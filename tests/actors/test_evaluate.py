"""Evaluation: whole episodes, raw returns, nothing counted that no policy did, nothing learned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from tests.toy_envs import toy_env
from unirl.actors.evaluate import make_evaluator
from unirl.core.evaluator import WatchableEvaluator
from unirl.envs.config import EnvConfig
from unirl.envs.make import spaces
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig

COUNTING = toy_env("Counting", kwargs={"terminate_after": 3, "truncate_after": 2})


def weights_for(env: EnvConfig, policy: PolicyConfig) -> dict[str, torch.Tensor]:
    return Policy(*spaces(env), policy, seed=0).weights()


def evaluator_of(env: EnvConfig, policy: PolicyConfig | None = None, **settings: Any) -> Any:
    policy = policy or PolicyConfig(hidden=(8,))
    return make_evaluator(env, policy, 1, **settings), weights_for(env, policy)


@pytest.mark.parametrize("engine", ["vector", "sync"])
@pytest.mark.parametrize("num_episodes", [1, 4, 7])
def test_returns_and_lengths_count_every_step_and_no_filler(engine: Any, num_episodes: int) -> None:
    # Rewards are 1, 2, 3: a terminated episode of three steps is worth 6, a truncated one of two 3.
    env = replace(COUNTING, engine=engine)
    evaluator, weights = evaluator_of(env, num_envs=2)
    result = evaluator.evaluate(weights, num_episodes)
    expected = {1: [(6, 3)], 4: [(3, 2)] * 2 + [(6, 3)] * 2, 7: [(3, 2)] * 3 + [(6, 3)] * 4}
    assert sorted(zip(result.returns, result.lengths, strict=True)) == expected[num_episodes]


def test_short_episodes_are_not_favoured() -> None:
    # One environment begins with the short episode, which ends long before the other one's.
    env = replace(COUNTING, kwargs={"terminate_after": 50, "truncate_after": 2, "stagger": True})
    evaluator, weights = evaluator_of(env, num_envs=2)
    assert sorted(evaluator.evaluate(weights, 4).lengths) == [2, 2, 50, 50]


def test_the_same_seed_plays_the_same_episodes_again() -> None:
    evaluator, weights = evaluator_of(EnvConfig("CartPole-v1"))
    other = make_evaluator(EnvConfig("CartPole-v1"), PolicyConfig(hidden=(8,)), 2)
    first = evaluator.evaluate(weights, 10)
    assert evaluator.evaluate(weights, 10) == first
    assert other.evaluate(weights, 10) != first


class Chain(gymnasium.Env[Any, Any]):
    """Without chance: always the same observation; action 1 earns 1; ends after ten steps."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return np.ones(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.ones(2, np.float32), float(action), self.t == 10, False, {}


@pytest.fixture
def chain() -> Iterator[EnvConfig]:
    gymnasium.register("unirl-test/Chain-v0", Chain)
    yield EnvConfig("unirl-test/Chain-v0")
    del gymnasium.registry["unirl-test/Chain-v0"]


def test_greedy_actions_need_no_random_numbers(chain: EnvConfig) -> None:
    evaluator, weights = evaluator_of(chain)
    assert len(set(evaluator.evaluate(weights, 20, deterministic=True).returns)) == 1
    assert len(set(evaluator.evaluate(weights, 20).returns)) > 1


def test_recurrent_state_is_reset_between_episodes(chain: EnvConfig) -> None:
    # A greedy policy repeats itself only if it remembers nothing of the episode before.
    policy = PolicyConfig(hidden=(8,), core="gru", core_size=8)
    weights = {name: 5 * value for name, value in weights_for(chain, policy).items()}
    returns = make_evaluator(chain, policy, 1, num_envs=1).evaluate(weights, 5, deterministic=True)
    assert 0 < returns.returns[0] < 10, "memory must change what is done within an episode"
    assert len(set(returns.returns)) == 1


def test_episodes_are_whole_where_an_engine_resets_within_the_step() -> None:
    env = replace(COUNTING, kwargs={"autoreset_mode": "SameStep"})
    evaluator, weights = evaluator_of(env, num_envs=2)
    result = evaluator.evaluate(weights, 5)
    # From every reset the first episode is the terminated one: 1 + 2 + 3.
    assert (result.returns, result.lengths) == ([6.0] * 5, [3] * 5)


def test_memory_is_refused_where_first_observations_are_hidden() -> None:
    env = replace(COUNTING, kwargs={"autoreset_mode": "SameStep"})
    evaluator, weights = evaluator_of(env, PolicyConfig(hidden=(8,), core="gru", core_size=8))
    with pytest.raises(UniRLError, match=r"policy\.core 'gru' .*toy/Counting-v0") as error:
        evaluator.evaluate(weights, 1)
    assert len(error.value.parts) == 3


def test_a_crash_of_an_environment_ends_the_evaluation_with_its_sentence() -> None:
    kwargs = {"sleep_at": 2, "sleep_seconds": 60.0}
    env = toy_env("Fault", "async", kwargs=kwargs, step_timeout=0.5)
    evaluator, weights = evaluator_of(env, num_envs=1)
    with pytest.raises(UniRLError, match=r"Fault-v0\" is stuck") as error:
        evaluator.evaluate(weights, 1)
    assert len(error.value.parts) == 3


def test_an_environments_exception_is_reported_with_file_and_line() -> None:
    evaluator, weights = evaluator_of(toy_env("Fault", kwargs={"raise_at": 3}))
    said = r'env "toy/Fault-v0" failed .* RuntimeError in .*toy.*\.py:\d+: fault at step 3'
    with pytest.raises(UniRLError, match=said) as error:
        evaluator.evaluate(weights, 1)
    assert len(error.value.parts) == 3


def test_an_environment_that_hangs_in_an_evaluation_is_named() -> None:
    kwargs = {"sleep_at": 3, "sleep_seconds": 600.0}
    env = toy_env("Fault", "sync", kwargs=kwargs, step_timeout=0.3)
    evaluator, weights = evaluator_of(env, num_envs=1)
    message = r'"toy/Fault-v0" did not answer within 0\.3 s: it hung in .*toy_envs\.py'
    with pytest.raises(UniRLError, match=message) as caught:
        evaluator.evaluate(weights, 1)
    assert len(caught.value.parts) == 3


def test_a_long_evaluation_of_quick_steps_is_no_hang() -> None:
    kwargs = {"reset_seconds": 0.25, "episode_length": 100}
    env = toy_env("Fault", "sync", kwargs=kwargs, step_timeout=0.3)
    evaluator, weights = evaluator_of(env, num_envs=1)
    assert len(evaluator.evaluate(weights, 30).lengths) == 30


def test_weights_and_statistics_stay_as_they_were() -> None:
    env, policy = EnvConfig("CartPole-v1"), PolicyConfig(hidden=(8,), normalize_obs=True)
    weights = weights_for(env, policy)
    before = {name: value.clone() for name, value in weights.items()}
    make_evaluator(env, policy, 1).evaluate(weights, 3)
    assert all(torch.equal(before[name], weights[name]) for name in before)


def test_continuous_actions_are_played() -> None:
    evaluator, weights = evaluator_of(EnvConfig("Pendulum-v1"))
    result = evaluator.evaluate(weights, 2)
    assert result.lengths == [200, 200] and all(value < 0 for value in result.returns)


def test_a_lost_life_does_not_end_an_atari_episode() -> None:
    # Without skill a life of Breakout lasts about 25 steps.
    pytest.importorskip("ale_py")
    env = EnvConfig("ALE/Breakout-v5", episodic_life=True, max_episode_steps=80, noop_max=0)
    evaluator, weights = evaluator_of(env, PolicyConfig(feature_size=16), num_envs=2)
    assert evaluator.evaluate(weights, 2).lengths == [80, 80]


@pytest.mark.parametrize("num_episodes", [0, -3])
def test_an_evaluation_without_episodes_is_refused(num_episodes: int) -> None:
    evaluator, weights = evaluator_of(COUNTING)
    with pytest.raises(UniRLError, match="must be >= 1"):
        evaluator.evaluate(weights, num_episodes)


def test_a_nan_of_the_environment_is_named() -> None:
    evaluator, weights = evaluator_of(toy_env("Fault", kwargs={"nan_at": 4}))
    with pytest.raises(UniRLError, match=r"Fault-v0.*nan"):
        evaluator.evaluate(weights, 3)


def test_weights_of_another_policy_are_refused() -> None:
    evaluator, _ = evaluator_of(COUNTING)
    with pytest.raises(UniRLError, match="do not fit"):
        evaluator.evaluate(weights_for(COUNTING, PolicyConfig(hidden=(9,))), 1)


def test_an_environment_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.actors.evaluate.MAX_STEPS", 100)
    env = replace(COUNTING, kwargs={"terminate_after": 0})
    evaluator, weights = evaluator_of(env)
    with pytest.raises(UniRLError, match=r"env\.max_episode_steps"):
        evaluator.evaluate(weights, 1)


def test_frames_show_every_step_of_every_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    evaluator, weights = evaluator_of(EnvConfig("CartPole-v1", max_episode_steps=5))
    assert isinstance(evaluator, WatchableEvaluator)
    frames = list(evaluator.frames(weights, num_episodes=2))
    # The first observation and one after each step.
    assert len(frames) == sum(evaluator.played.lengths) + 2
    assert evaluator.played.lengths == [5, 5] and evaluator.frames_per_second == 50
    assert all(frame.shape == (400, 600, 3) and frame.dtype == np.uint8 for frame in frames)
    assert not np.array_equal(frames[0], frames[5])


def test_atari_frames_are_the_game_in_colour() -> None:
    pytest.importorskip("ale_py")
    env = EnvConfig("ALE/Pong-v5", max_episode_steps=30)
    evaluator, weights = evaluator_of(env, PolicyConfig(feature_size=16))
    frames = list(evaluator.frames(weights))
    assert evaluator.played.lengths == [30] and evaluator.frames_per_second == 15
    assert all(frame.shape == (210, 160, 3) and frame.dtype == np.uint8 for frame in frames)
    assert any(not np.array_equal(a, b) for a, b in itertools.pairwise(frames))
    assert np.ptp(frames[-1].astype(int), axis=2).max() > 50  # the channels differ: colour


def test_what_the_policy_sees_and_what_is_shown_is_one_game() -> None:
    pytest.importorskip("ale_py")
    from unirl.envs.make import make_vec

    config = EnvConfig("ALE/Pong-v5", engine="ale", num_threads=1, max_episode_steps=400)
    colour = {"grayscale": False, "img_height": 210, "img_width": 160}
    game = make_vec(config, 1)
    screen = make_vec(EnvConfig(config.id, "ale", 1, colour, 400, frame_stack=1), 1)
    try:
        game.reset(5), screen.reset(5)
        rng = np.random.default_rng(0)
        for action in rng.integers(6, size=401):
            a, b = game.step(np.array([action])), screen.step(np.array([action]))
            assert (a.reward, a.terminated, a.truncated) == (b.reward, b.terminated, b.truncated)
    finally:
        game.close()
        screen.close()


def test_an_environment_without_pictures_is_refused_in_three_parts() -> None:
    evaluator, weights = evaluator_of(COUNTING)
    with pytest.warns(UserWarning, match="render_mode"), pytest.raises(UniRLError) as error:
        next(evaluator.frames(weights))
    assert len(error.value.parts) == 3 and "cannot be drawn" in error.value.what


def test_kwargs_of_an_engine_are_reported_as_gymnasium_says_it() -> None:
    config = EnvConfig(id="CartPole-v1", engine="vector", kwargs={"num_threads_of_engine": 2})
    evaluator = make_evaluator(config, PolicyConfig(), seed=0)
    with pytest.raises(UniRLError) as error:
        next(evaluator.frames({}))
    assert len(error.value.parts) == 3 and "num_threads_of_engine" in error.value.rule
    assert "env.kwargs" in error.value.remedy
