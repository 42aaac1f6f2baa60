"""Random-action bursts: how often, how long, the same for a seed, and never in an evaluation."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from numpy.typing import NDArray

import unirl
from unirl.actors.evaluate import make_evaluator
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.random_bursts import RandomBurstEnv
from unirl.envs.vector import EnvStep
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig


class Echo:
    """Shows the action that was executed."""

    hides_first_obs = False
    observation_space = spaces.Discrete(2)

    def __init__(self, action_space: Space[Any], num_envs: int) -> None:
        self.action_space, self.num_envs = action_space, num_envs

    def reset(self, seed: int) -> Any:
        return np.zeros(self.num_envs)

    def step(self, action: NDArray[Any]) -> EnvStep:
        no, yes = np.zeros(self.num_envs, np.bool_), np.ones(self.num_envs, np.bool_)
        return EnvStep(action.copy(), action, np.zeros(self.num_envs, np.float32), no, no, yes)

    def close(self) -> None:
        pass


def bursts(probability: float, steps: tuple[int, int]) -> EnvConfig:
    return EnvConfig("Echo", random_burst_probability=probability, random_burst_steps=steps)


def executed(seed: int, num_steps: int, *, probability: float = 0.05, num_envs: int = 8) -> Any:
    """What was executed where the policy always says -1, which no burst does: [T, B]."""
    env = RandomBurstEnv(Echo(spaces.Discrete(4), num_envs), bursts(probability, (3, 6)))
    env.reset(seed)
    says = np.full(num_envs, -1)
    actions = np.stack([env.step(says).obs for _ in range(num_steps)])
    assert (says == -1).all()  # the caller's array is left alone
    return actions


def test_bursts_come_as_often_and_last_as_long_as_they_are_said_to() -> None:
    actions = executed(1, 4000)
    rows = [[(action, len(list(run))) for action, run in groupby(row)] for row in actions.T]
    runs = [run for row in rows for run in row[:-1]]  # the last one may be cut off
    lengths = [length for action, length in runs if action >= 0]
    # Two bursts may follow each other with the same action: rare, and longer than one.
    assert min(lengths) == 3 and np.mean(np.array(lengths) <= 6) > 0.97
    assert {action for action, _ in runs} == {-1, 0, 1, 2, 3}
    # A burst begins after 1 / 0.05 = 20 steps on average, 19 of them free, and lasts 4.5.
    assert np.mean(actions >= 0) == pytest.approx(4.5 / 23.5, abs=0.015)


def test_bursts_are_a_function_of_the_seed_and_rows_differ() -> None:
    assert np.array_equal(executed(1, 300), executed(1, 300))
    assert not np.array_equal(executed(1, 300), executed(2, 300))
    actions = executed(1, 300)
    assert not np.array_equal(actions[:, 0], actions[:, 1])


def test_without_probability_there_are_none() -> None:
    assert (executed(1, 500, probability=0.0) == -1).all()
    assert not isinstance(make_vec(EnvConfig(), 2), RandomBurstEnv)
    assert isinstance(make_vec(EnvConfig(random_burst_probability=0.1), 2), RandomBurstEnv)


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([2, 5]), spaces.Box(-2.0, 3.0, (3,)), spaces.Discrete(3)]
)
def test_burst_actions_are_in_the_space(space: Space[Any]) -> None:
    env = RandomBurstEnv(Echo(space, 6), bursts(1.0, (1, 2)))
    env.reset(3)
    says = np.stack([space.sample() for _ in range(6)])
    seen = [env.step(says).obs for _ in range(50)]
    assert all(space.contains(action) for actions in seen for action in actions)
    assert seen[0].dtype == says.dtype and len({actions.tobytes() for actions in seen}) > 10


def test_actions_without_bounds_are_refused() -> None:
    with pytest.raises(UniRLError, match="cannot have random-action bursts"):
        RandomBurstEnv(Echo(spaces.Box(-np.inf, np.inf, (2,)), 1), bursts(0.1, (1, 2)))


@pytest.mark.parametrize(
    "settings",
    [
        {"random_burst_probability": 1.5},
        {"random_burst_steps": (0, 3)},
        {"random_burst_steps": (5, 3)},
        {"id": "torch/Cartpole", "random_burst_probability": 0.1},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UniRLError, match="random_burst_"):
        EnvConfig(**settings)


def test_evaluations_have_no_bursts() -> None:
    policy = PolicyConfig()
    results = []
    for probability in (0.0, 1.0):
        config = EnvConfig(random_burst_probability=probability)
        evaluator = make_evaluator(config, policy, 1, num_envs=2)
        env = make_vec(config, 1)
        weights = Policy(env.observation_space, env.action_space, policy, seed=0).weights()
        results.append(evaluator.evaluate(weights, 4, deterministic=True).returns)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["probability", "steps"])
def test_the_keys_of_earlier_versions_fail_with_the_names_of_today(name: str) -> None:
    with pytest.raises(UniRLError, match=rf"env\.random_burst_{name}"):
        unirl.make_plan("impala", **{f"env.push_{name}": 0})
