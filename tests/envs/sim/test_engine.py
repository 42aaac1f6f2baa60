"""Simulators behind `make_vec`: what samplers and the evaluator of the host see of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from tests.envs.sim.countdown import Countdown
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.sim.engine import SimEngine
from unirl.envs.vector import EngineEnv, EnvStep, VectorEnv
from unirl.errors import UniRLError

STAY, BREAK = 0.0, 1.0


def vector(**settings: Any) -> VectorEnv:
    return EngineEnv(SimEngine(Countdown(2, **settings)), 2, "test/Countdown")


def act(env: VectorEnv, *actions: float) -> EnvStep:
    return env.step(np.array(actions, dtype=np.float32)[:, None])


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("limit", ["terminate_after", "truncate_after"])
def test_an_end_brings_its_true_final_observation(mode: str, limit: str) -> None:
    env = vector(autoreset=mode, **{limit: 3})
    env.reset(0)
    for _ in range(2):
        act(env, STAY, STAY)
    end = act(env, STAY, STAY)
    assert end.obs.tolist() == [[0, 3], [1, 3]]
    assert end.reward.tolist() == [3, 3]
    assert end.mask.all()
    flags = {"terminate_after": end.terminated, "truncate_after": end.truncated}
    assert all(flag.all() == (name == limit) for name, flag in flags.items())
    filler = act(env, STAY, STAY)
    assert not filler.mask.any()
    assert filler.reward.tolist() == [0, 0]
    # Within the filler a simulator that cannot wait takes its first step.
    begun = 1 if mode == "same_step" else 0
    assert filler.acting_obs[:, 1].tolist() == [begun, begun]
    assert act(env, STAY, STAY).reward.tolist() == [begun + 1, begun + 1]


def test_the_hidden_first_step_is_taken_with_action_zero() -> None:
    env = vector(truncate_after=3)
    env.reset(0)
    for _ in range(3):
        act(env, STAY, STAY)
    act(env, BREAK, STAY)  # would break the row, were it taken
    assert act(env, STAY, STAY).mask.all()


def test_an_end_within_the_filler_is_followed_by_another_filler() -> None:
    env = vector(terminate_after=1)
    env.reset(0)
    steps = [act(env, STAY, STAY) for _ in range(5)]
    assert [bool(step.mask.all()) for step in steps] == [True, False, False, False, False]
    assert [bool(step.terminated.any()) for step in steps] == [True] + [False] * 4


def test_a_policy_with_memory_may_use_it() -> None:
    assert not vector().hides_first_obs


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_a_lost_row_is_truncated_where_it_last_was_finite(mode: str) -> None:
    env = vector(autoreset=mode)
    env.reset(0)
    act(env, STAY, STAY)
    act(env, STAY, STAY)
    lost = act(env, STAY, BREAK)
    assert lost.obs.tolist() == [[0, 3], [1, 2]]
    assert lost.reward.tolist() == [3, 0]
    assert not lost.terminated.any()
    assert lost.truncated.tolist() == [False, True]
    after = act(env, STAY, STAY)
    assert after.mask.tolist() == [True, False]
    assert not after.truncated.any()
    assert np.isfinite(after.obs).all()
    assert act(env, STAY, STAY).mask.all()


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_a_row_that_stays_lost_ends_one_episode_and_shows_nothing(mode: str) -> None:
    env = vector(autoreset=mode, heals=False)
    env.reset(0)
    act(env, STAY, STAY)
    steps = [act(env, STAY, BREAK if i == 0 else STAY) for i in range(6)]
    assert [bool(step.mask[1]) for step in steps] == [True] + [False] * 5
    assert all(step.obs.tolist()[1] == [1, 1] for step in steps)
    assert all(step.mask[0] for step in steps)


def test_the_filler_of_a_next_step_simulator_is_no_lost_row() -> None:
    engine = SimEngine(Countdown(1, truncate_after=2, autoreset="next_step"))
    engine.reset(0)
    action = np.zeros((1, 1), dtype=np.float32)
    truncated = [bool(engine.step(action)[3][0]) for _ in range(9)]
    assert truncated == [False, True, False] * 3


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_what_was_given_does_not_change_with_the_next_step(mode: str) -> None:
    env = vector(autoreset=mode, truncate_after=5)
    first = env.reset(0)
    kept: list[tuple[Any, Any]] = [(first, first.copy())]
    for i in range(12):
        step = act(env, STAY, BREAK if i == 7 else STAY)
        arrays = (step.obs, step.acting_obs, step.reward, step.terminated, step.truncated)
        kept += [(array, array.copy()) for array in arrays]
    assert all(np.array_equal(array, copy) for array, copy in kept)


def test_several_groups_are_a_dictionary() -> None:
    env = vector(critic=True, truncate_after=2)
    assert isinstance(env.observation_space, spaces.Dict)
    assert env.reset(0)["critic"].tolist() == [[0, 0], [1, 0]]
    act(env, STAY, STAY)
    end = act(env, STAY, STAY)
    assert end.obs["policy"].tolist() == [[0, 2], [1, 2]]
    assert end.obs["critic"].tolist() == [[0, 20], [1, 20]]
    assert act(env, STAY, STAY).obs["critic"].tolist() == [[0, 10], [1, 10]]


def test_a_simulator_that_hides_final_observations_is_refused() -> None:
    sim = Countdown(1, gives_final_obs=False)
    with pytest.raises(UniRLError, match="must give final observations"):
        SimEngine(sim)
    assert sim.closed == 1


def test_cartpole_counts_the_steps_that_gymnasium_counts() -> None:
    """Returns of whole episodes, both pushed in turns to the left and to the right."""
    lengths: dict[str, list[float]] = {}
    for env_id in ("torch/CartPole-v1", "CartPole-v1"):
        env = make_vec(EnvConfig(id=env_id), 200)
        env.reset(0)
        running, lengths[env_id] = np.zeros(200), []
        for i in range(300):
            step = env.step(np.full(200, i % 2))
            running += step.reward
            ended = step.terminated | step.truncated
            lengths[env_id] += running[ended].tolist()
            running[ended] = 0
    ours, theirs = (np.array(lengths[env_id]) for env_id in ("torch/CartPole-v1", "CartPole-v1"))
    error = np.hypot(ours.std() / len(ours) ** 0.5, theirs.std() / len(theirs) ** 0.5)
    assert len(ours) > 500
    # The two differ in one respect: behind the filler the push may begin on the other side.
    assert abs(ours.mean() - theirs.mean()) < 4 * error + 1
