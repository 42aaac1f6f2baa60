"""The last action as an observation: what was executed, none where an episode begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.toy_envs import toy_env
from unirl.actors.evaluate import make_evaluator
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.make import spaces as spaces_of
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig


class Named(gymnasium.Env[Any, Any]):
    """Observations are a Dict; an episode has three steps."""

    def __init__(self, name: str = "image") -> None:
        box = spaces.Box(0, 1, (2,), np.float32)
        self.observation_space = spaces.Dict({name: box})
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._name, self._steps = name, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._steps = 0
        return {self._name: np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return {self._name: np.ones(2, np.float32)}, 0.0, self._steps == 3, False, {}


def same_step(num_envs: int) -> SyncVectorEnv[Any, Any]:
    return SyncVectorEnv([Named] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture(autouse=True)
def registered() -> Any:
    ids = ("test/Named-v0", "test/SameStepNamed-v0", "test/Taken-v0")
    gymnasium.register(ids[0], Named)
    gymnasium.register(ids[1], vector_entry_point=same_step)
    gymnasium.register(ids[2], Named, kwargs={"name": "last_action"})
    yield
    for each in ids:
        del gymnasium.registry[each]


def test_a_row_shows_the_action_that_led_to_it_and_none_after_a_filler() -> None:
    env = make_vec(EnvConfig(last_action=True, max_episode_steps=3, engine="sync"), 2)
    assert env.observation_space == spaces_of(EnvConfig(last_action=True))[0]
    assert set(env.observation_space.spaces) == {"obs", "last_action"}  # type: ignore[attr-defined]
    first = env.reset(1)
    assert first["last_action"].tolist() == [0, 0] and first["obs"].shape == (2, 4)
    seen = []
    for action in ([1, 0], [0, 1], [1, 1], [1, 1], [1, 0]):
        given = np.array(action)
        step = env.step(given)
        assert given.tolist() == action and step.obs is step.acting_obs
        seen.append((step.obs["last_action"].tolist(), step.truncated.all(), step.mask.all()))
    assert seen == [
        ([1, 0], False, True),
        ([0, 1], False, True),
        ([1, 1], True, True),  # the final observation, after a real action
        ([0, 0], False, False),  # the filler's action led to nothing
        ([1, 0], False, True),
    ]


def test_in_a_same_step_engine_the_policy_acts_on_no_action_yet() -> None:
    env = make_vec(EnvConfig("test/SameStepNamed-v0", last_action=True), 2)
    env.reset(0)
    given = np.full((2, 2), 0.5, np.float32)
    steps = [env.step(given) for _ in range(4)]
    assert [float(step.obs["last_action"].max()) for step in steps] == [0.5] * 4
    assert [float(step.acting_obs["last_action"].max()) for step in steps] == [0.5, 0.5, 0.0, 0.5]


def test_after_a_limit_in_a_same_step_engine_the_policy_acts_on_no_action_yet_either() -> None:
    kwargs = {"autoreset_mode": "SameStep"}
    env = make_vec(toy_env("Counting", last_action=True, kwargs=kwargs), 1)
    env.reset(0)
    steps = [env.step(np.ones(1, np.int64)) for _ in range(5)]
    ends = [(bool(step.terminated[0]), bool(step.truncated[0])) for step in steps]
    assert ends[2] == (True, False) and ends[4] == (False, True)
    assert [int(step.acting_obs["last_action"][0]) for step in steps] == [1, 1, 0, 1, 0]
    assert [int(step.obs["last_action"][0]) for step in steps] == [1] * 5


def test_actions_of_a_box_are_shown_as_executed() -> None:
    env = make_vec(EnvConfig(id="test/Named-v0", last_action=True), 1)
    assert set(env.reset(0)) == {"image", "last_action"}
    step = env.step(np.array([[3.0, -0.25]], np.float32))
    assert step.obs["last_action"].tolist() == [[1.0, -0.25]]
    assert step.obs["last_action"].dtype == np.float32


def test_a_pushed_row_shows_the_push() -> None:
    config = EnvConfig(last_action=True, random_burst_probability=1.0, random_burst_steps=(1, 1))
    env = make_vec(config, 64)
    env.reset(0)
    shown = env.step(np.zeros(64, np.int64)).obs["last_action"]
    assert 10 < shown.sum() < 54


def test_a_policy_reads_it_in_training_and_in_evaluations() -> None:
    config = EnvConfig(last_action=True, max_episode_steps=20)
    observation_space, action_space = spaces_of(config)
    policy = Policy(observation_space, action_space, PolicyConfig(), seed=0)
    result = make_evaluator(config, PolicyConfig(), 1, num_envs=2).evaluate(policy.weights(), 3)
    assert len(result.returns) == 3


@pytest.mark.parametrize(
    "env", [EnvConfig(max_episode_steps=9), EnvConfig("ALE/Pong-v5", max_episode_steps=9)]
)
def test_videos_show_a_policy_that_reads_it(env: EnvConfig) -> None:
    config = replace(env, last_action=True)
    policy = PolicyConfig(hidden=(8,), feature_size=8)
    weights = Policy(*spaces_of(config), policy, seed=0).weights()
    player = make_evaluator(config, policy, 1)
    assert len(list(player.frames(weights))) == sum(player.played.lengths) + 1


def test_a_name_that_is_taken_and_simulators_are_refused() -> None:
    with pytest.raises(UniRLError, match="named 'last_action' already"):
        make_vec(EnvConfig(id="test/Taken-v0", last_action=True), 1)
    with pytest.raises(UniRLError, match="simulators on a device"):
        EnvConfig(id="torch/Cartpole", last_action=True)
