"""Every engine keeps one convention: true final observations, then one empty filler row."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.toy_envs import Counting, toy_env
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.vector import MAX_FILLERS, EngineEnv, VectorEnv, env_seeds
from unirl.errors import UniRLError

# Episodes of Counting by hand: number 0 terminates after 3 steps, number 1 is truncated after 2,
# and so on in turn. One row per step: observation after it, reward, terminated, truncated, mask.
FROM_EPISODE_0 = [
    ((0, 1), 1, False, False, True),
    ((0, 2), 2, False, False, True),
    ((0, 3), 3, True, False, True),
    ((1, 0), 0, False, False, False),  # filler
    ((1, 1), 1, False, False, True),
    ((1, 2), 2, False, True, True),
    ((2, 0), 0, False, False, False),  # filler
    ((2, 1), 1, False, False, True),
    ((2, 2), 2, False, False, True),
    ((2, 3), 3, True, False, True),
    ((3, 0), 0, False, False, False),  # filler
]
FROM_EPISODE_1 = [
    ((1, 1), 1, False, False, True),
    ((1, 2), 2, False, True, True),
    ((2, 0), 0, False, False, False),  # filler
    ((2, 1), 1, False, False, True),
    ((2, 2), 2, False, False, True),
    ((2, 3), 3, True, False, True),
    ((3, 0), 0, False, False, False),  # filler
    ((3, 1), 1, False, False, True),
    ((3, 2), 2, False, True, True),
    ((4, 0), 0, False, False, False),  # filler
    ((4, 1), 1, False, False, True),
]
# The same episodes in a same-step engine: the filler hides the first transition of each episode.
# The last column is what the policy acts on next: after an end, the next episode's first
# observation.
SAME_STEP_FROM_EPISODE_0 = [
    ((0, 1), 1, False, False, True, (0, 1)),
    ((0, 2), 2, False, False, True, (0, 2)),
    ((0, 3), 3, True, False, True, (1, 0)),
    ((1, 1), 0, False, False, False, (1, 1)),  # filler
    ((1, 2), 2, False, True, True, (2, 0)),
    ((2, 1), 0, False, False, False, (2, 1)),  # filler
    ((2, 2), 2, False, False, True, (2, 2)),
    ((2, 3), 3, True, False, True, (3, 0)),
    ((3, 1), 0, False, False, False, (3, 1)),  # filler
]
SAME_STEP_FROM_EPISODE_1 = [
    ((1, 1), 1, False, False, True, (1, 1)),
    ((1, 2), 2, False, True, True, (2, 0)),
    ((2, 1), 0, False, False, False, (2, 1)),  # filler
    ((2, 2), 2, False, False, True, (2, 2)),
    ((2, 3), 3, True, False, True, (3, 0)),
    ((3, 1), 0, False, False, False, (3, 1)),  # filler
    ((3, 2), 2, False, True, True, (4, 0)),
    ((4, 1), 0, False, False, False, (4, 1)),  # filler
    ((4, 2), 2, False, False, True, (4, 2)),
]


@pytest.fixture(autouse=True)
def sync_same_step() -> Any:
    """Gymnasium's own same-step engine, whose final observations come one object per
    environment."""

    def build(num_envs: int, mode: str = "SameStep") -> SyncVectorEnv[Any, Any]:
        envs = [lambda first=i % 2: _Started(first) for i in range(num_envs)]
        return SyncVectorEnv(envs, autoreset_mode=AutoresetMode(mode))

    gymnasium.register("test/SyncSameStep-v0", vector_entry_point=build)
    yield
    del gymnasium.registry["test/SyncSameStep-v0"]


class _Started(Counting):
    """Counting whose first episode has a number given, whatever the seed."""

    def __init__(self, first: int) -> None:
        super().__init__(stagger=True)
        self._first = first

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None if seed is None else self._first, options=options)


def rows(env: VectorEnv, num_steps: int) -> list[Any]:
    return [env.step(np.zeros(env.num_envs, dtype=np.int64)) for _ in range(num_steps)]


def seed_with_both_parities(num_envs: int) -> int:
    """Counting with stagger begins with episode 1 where an environment's seed is odd."""
    return next(seed for seed in range(100) if len({s % 2 for s in env_seeds(seed, num_envs)}) == 2)


@pytest.mark.parametrize("engine", ["vector", "sync", "async"])
def test_every_row_of_a_hand_computed_episode_is_right(engine: Any) -> None:
    env = make_vec(toy_env("Counting", engine, kwargs={"stagger": True}), 3)
    try:
        first = env.reset(seed_with_both_parities(3))
        starts = first[:, 0].astype(int).tolist()
        assert set(starts) == {0, 1}, "the environments must be out of step for this test"
        assert first[:, 1].tolist() == [0, 0, 0]
        for t, step in enumerate(rows(env, len(FROM_EPISODE_0))):
            assert step.acting_obs is step.obs
            for i, start in enumerate(starts):
                obs, reward, terminated, truncated, mask = (FROM_EPISODE_0, FROM_EPISODE_1)[start][
                    t
                ]
                assert tuple(step.obs[i]) == obs, (engine, t, i)
                assert step.reward[i] == reward, (engine, t, i)
                assert (step.terminated[i], step.truncated[i]) == (terminated, truncated)
                assert step.mask[i] == mask, (engine, t, i)
            assert step.reward.dtype == np.float32
            assert {a.dtype for a in (step.terminated, step.truncated, step.mask)} == {
                np.dtype(bool)
            }
    finally:
        env.close()


@pytest.mark.parametrize(
    "config",
    [
        toy_env("Counting", kwargs={"autoreset_mode": "SameStep", "stagger": True}),
        EnvConfig("test/SyncSameStep-v0", "vector"),
    ],
    ids=["batched final_obs", "one final_obs object per environment"],
)
def test_a_same_step_engine_gives_true_final_observations_and_hides_one_transition(
    config: EnvConfig,
) -> None:
    env = make_vec(config, 2)
    assert env.reset(0).tolist() == [[0, 0], [1, 0]]
    for t, step in enumerate(rows(env, len(SAME_STEP_FROM_EPISODE_0))):
        for i, table in enumerate((SAME_STEP_FROM_EPISODE_0, SAME_STEP_FROM_EPISODE_1)):
            obs, reward, terminated, truncated, mask, acting = table[t]
            assert tuple(step.obs[i]) == obs, (t, i)
            assert tuple(step.acting_obs[i]) == acting, (t, i)
            assert step.reward[i] == reward, (t, i)
            assert (step.terminated[i], step.truncated[i]) == (terminated, truncated)
            assert step.mask[i] == mask, (t, i)


def test_a_hidden_step_that_ends_its_episode_is_followed_by_another_filler() -> None:
    # Odd episodes last one step: they are over within the hidden transition of their filler.
    kwargs = {"autoreset_mode": "SameStep", "terminate_after": 2, "truncate_after": 1}
    env = make_vec(toy_env("Counting", kwargs=kwargs), 1)
    env.reset(0)
    steps = rows(env, 6)
    assert [bool(s.mask[0]) for s in steps] == [True, True, False, False, True, False]
    assert [bool(s.terminated[0]) for s in steps] == [False, True, False, False, True, False]
    assert not any(s.truncated[0] for s in steps)
    assert [float(s.reward[0]) for s in steps] == [1, 2, 0, 0, 2, 0]
    assert steps[1].obs[0].tolist() == [0, 2]
    assert [s.acting_obs[0].tolist() for s in steps[1:4]] == [[1, 0], [2, 0], [2, 1]]


class Scripted:
    """A next-step engine of one environment that tells a script's ends: t, c(ut off) or none."""

    autoreset_mode = AutoresetMode.NEXT_STEP
    observation_space = spaces.Box(0, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, script: str) -> None:
        self._script = iter(script)

    def reset(self, seed: int) -> Any:
        return np.zeros((1, 1), np.float32)

    def step(self, action: Any) -> Any:
        end = next(self._script)
        obs, reward = np.zeros((1, 1), np.float32), np.ones(1)
        return obs, reward, np.array([end == "t"]), np.array([end == "c"]), {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("end", ["t", "c"])
def test_an_end_within_a_filler_is_no_end_and_brings_another_filler(end: str) -> None:
    env: Any = EngineEnv(Scripted(f".{end}{end}..."), 1, "Scripted")
    env.reset(0)
    steps = rows(env, 6)
    assert [bool(s.mask[0]) for s in steps] == [True, True, False, False, True, True]
    assert [bool(s.terminated[0] | s.truncated[0]) for s in steps] == [False, True] + [False] * 4
    assert [float(s.reward[0]) for s in steps] == [1, 1, 0, 0, 1, 1]


def test_an_engine_without_autoreset_is_refused() -> None:
    config = toy_env("Counting", kwargs={"autoreset_mode": "Disabled"})
    with pytest.raises(UniRLError, match="NextStep or SameStep, found Disabled") as caught:
        make_vec(config, 1)
    assert len(caught.value.parts) == 3


@pytest.mark.parametrize("engine", ["vector", "sync", "async", "envpool"])
def test_cartpole_is_cut_off_at_its_limit_and_falls_before_it(engine: Any) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool", reason="the extra envpool is not installed")
    limit, num_envs = 12, 8
    env = make_vec(EnvConfig("CartPole-v1", engine, max_episode_steps=limit), num_envs)
    try:
        env.reset(3)
        length, seen = np.zeros(num_envs, dtype=int), {"fell": 0, "cut": 0, "filler": 0}
        was_done = np.zeros(num_envs, dtype=bool)
        pushes = np.arange(num_envs) < num_envs // 2  # the first half is pushed over, always right
        for t in range(120):
            step = env.step(np.where(pushes, 1, t % 2))
            assert (step.mask == ~was_done).all(), "exactly the row after an end is a filler"
            assert (step.reward == step.mask).all(), "CartPole pays 1, a filler 0"
            length = np.where(step.mask, length + 1, 0)
            fallen = (np.abs(step.obs[:, 0]) > 2.4) | (np.abs(step.obs[:, 2]) > 0.2095)
            fallen &= step.mask
            # EnvPool alone hides a fall in the very step of the limit.
            ends = fallen & (length < limit) if engine == "envpool" else fallen
            assert (step.terminated == ends).all()
            assert (step.truncated == (length == limit)).all()
            fresh = ~step.mask
            assert (np.abs(step.obs[fresh]) <= 0.05).all(), "a filler brings a first observation"
            was_done = step.terminated | step.truncated
            seen["fell"] += int(step.terminated.sum())
            seen["cut"] += int((step.truncated & ~step.terminated).sum())
            seen["filler"] += int(fresh.sum())
        assert min(seen.values()) > 10, seen
    finally:
        env.close()


def trajectory(config: EnvConfig, num_envs: int, seed: int, num_steps: int = 60) -> list[Any]:
    env = make_vec(config, num_envs)
    try:
        actions = np.random.default_rng(0).integers(0, 2, size=(num_steps, num_envs))
        return [env.reset(seed), *(env.step(a).obs for a in actions)]
    finally:
        env.close()


@pytest.mark.parametrize("engine", ["vector", "sync", "async", "envpool"])
def test_a_seed_gives_one_trajectory_and_every_environment_its_own(engine: Any) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool", reason="the extra envpool is not installed")
    config = EnvConfig("CartPole-v1", engine)
    one, again, other = (trajectory(config, 4, seed) for seed in (7, 7, 8))
    assert all((a == b).all() for a, b in zip(one, again, strict=True))
    assert (one[0] != other[0]).any()
    assert len(np.unique(one[0], axis=0)) == 4


@pytest.mark.parametrize("engine", ["vector", "sync", "async", "envpool"])
def test_a_second_reset_starts_the_seed_over(engine: Any) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool", reason="the extra envpool is not installed")
    env = make_vec(EnvConfig("CartPole-v1", engine), 2)
    try:
        first = env.reset(5)
        for _ in range(40):
            env.step(np.ones(2, dtype=np.int64))
        assert (env.reset(5) == first).all()
        # An episode's end before the reset leaves no filler behind.
        assert env.step(np.ones(2, dtype=np.int64)).mask.all()
    finally:
        env.close()


def test_a_reset_of_a_same_step_engine_leaves_no_filler_behind() -> None:
    kwargs = {"autoreset_mode": "SameStep", "terminate_after": 1}
    env = make_vec(toy_env("Counting", "vector", kwargs=kwargs), 1)
    for _ in range(2):
        env.reset(0)
        step = env.step(np.zeros(1, np.int64))
        assert step.mask.all() and step.terminated.all()


def test_sync_and_async_step_the_same_environments() -> None:
    for seed in (0, 1):
        one = trajectory(EnvConfig("CartPole-v1", "sync"), 3, seed)
        two = trajectory(EnvConfig("CartPole-v1", "async"), 3, seed)
        assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_environment_seeds_are_distinct_and_do_not_depend_on_their_number() -> None:
    many = env_seeds(11, 4096)
    assert len(set(many)) == len(many) == 4096
    assert all(0 <= seed < 2**31 for seed in many)
    assert env_seeds(11, 10) == many[:10]
    assert not set(env_seeds(12, 100)) & set(many[:100])


def test_actions_of_the_wrong_shape_are_refused() -> None:
    env = make_vec(EnvConfig("CartPole-v1"), 3)
    env.reset(0)
    with pytest.raises(UniRLError, match=r"expected \(3,\), received \(2,\)"):
        env.step(np.zeros(2, dtype=np.int64))


def test_a_same_step_engine_whose_episodes_all_last_one_step_is_given_up() -> None:
    kwargs = {"autoreset_mode": "SameStep", "terminate_after": 1, "truncate_after": 1}
    env = make_vec(toy_env("Counting", "vector", kwargs=kwargs), 2)
    env.reset(0)
    with pytest.raises(UniRLError, match="ends every episode at its first step"):
        rows(env, MAX_FILLERS + 2)
    kwargs["terminate_after"] = 2
    env = make_vec(toy_env("Counting", "vector", kwargs=kwargs), 2)
    env.reset(0)
    assert sum(step.mask.sum() for step in rows(env, MAX_FILLERS + 2)) > MAX_FILLERS / 2
