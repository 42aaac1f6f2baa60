"""A trained policy in a loop of one's own: raw observations in, the environment's actions out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import unirl
from tests.runners.test_policies import DUEL
from unirl.core.seeding import derive_seed
from unirl.envs.config import EnvConfig
from unirl.envs.one import make_one
from unirl.envs.vector import env_seeds
from unirl.errors import UniRLError

MATCH: dict[str, Any] = {
    "env.id": "unirl-test/Match-v0",
    "env.import_module": "tests.space_envs",
    "actor.num_envs": 4,
    "actor.unroll_length": 7,
    "policy.hidden": (16,),
    "policy.core_size": 8,
    "learner.optimizer.lr": 6e-3,
    "run.total_steps": 300,
}
SPACES: dict[str, dict[str, Any]] = {
    "hybrid": {"env.kwargs": {"action": "hybrid", "mask": "info"}, "env.last_action": True},
    "tuple": {"env.kwargs": {"action": "tuple"}, "policy.core": "gru"},
    "own": {
        "env.kwargs": {"action": "choice"},
        "policy.module": "tests.networks:Memory",
        "policy.core": "own",
    },
    "mask": {"env.kwargs": {"action": "choices", "mask": "obs"}},
    "text": {
        "env.id": "unirl-test/Words-v0",
        "env.drop_observations": ["mission", "given/mission"],
    },
}


def trained(folder: Path, recipe: str = "impala", **settings: Any) -> unirl.TrainedRun:
    """A run of a few updates, loaded."""
    unirl.run(unirl.make_plan(recipe, **settings), folder, console=False)
    return unirl.load(folder)


@pytest.fixture(scope="module", params=SPACES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return trained(folder, **{**MATCH, **SPACES[request.param]})


def mask_of(run: unirl.TrainedRun, info: dict[str, Any]) -> dict[str, Any]:
    return {"action_mask": info["action_mask"]} if run.config.env.action_mask == "info" else {}


def episode(run: unirl.TrainedRun, seed: int, deterministic: bool) -> float:
    """The return of one, played as a user plays it; the environment checks each action."""
    env, policy = run.make_env(), run.policy()
    observation, info = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        mask = mask_of(run, info)
        action = policy.act(observation, deterministic=deterministic, **mask)
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, info = env.step(action)
        total, over = total + float(reward), terminated or truncated
    env.close()
    return total


def test_a_loop_of_ones_own_earns_what_an_evaluation_of_the_same_seed_does(run: Any) -> None:
    for seed in (3, 4):
        evaluated = run.evaluate(1, deterministic=True, seed=seed)
        own_seed = env_seeds(derive_seed(seed, "eval", "environments") % 2**32, 1)[0]
        played = episode(run, own_seed, deterministic=True)
        assert [pytest.approx(played)] == evaluated.returns
    assert episode(run, 1, deterministic=False) >= 0


def test_a_batch_is_acted_on_as_its_rows_are_one_by_one(run: Any) -> None:
    envs = [run.make_env() for _ in range(3)]
    firsts = [env.reset(seed=i) for i, env in enumerate(envs)]
    alone = [run.policy().act(obs, **mask_of(run, info)) for obs, info in firsts]
    space = envs[0].observation_space
    empty: Any = gymnasium.vector.utils.create_empty_array(space, 3)
    batch = gymnasium.vector.utils.concatenate(space, [obs for obs, _ in firsts], empty)
    masks = [mask_of(run, info) for _, info in firsts]
    stacked = {name: [mask[name] for mask in masks] for name in masks[0]}
    together = run.policy().act(batch, **stacked)
    batched = gymnasium.vector.utils.batch_space(envs[0].action_space, 3)
    rows = list(gymnasium.vector.utils.iterate(batched, together))
    for one, other in zip(alone, rows, strict=True):
        flat = [gymnasium.spaces.flatten(envs[0].action_space, each) for each in (one, other)]
        np.testing.assert_allclose(*flat, rtol=1e-5)


def test_what_it_remembers_is_of_its_rows_until_it_is_reset(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", **MATCH, **SPACES["tuple"])
    policy, batch = run.policy(), np.ones((3, *run.make_env().observation_space.shape), np.float32)
    first, second = policy.act(batch), policy.act(batch)
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    policy.reset(np.array([True, False, False]))
    third = policy.act(batch)
    np.testing.assert_allclose(third[1][0], first[1][0], rtol=1e-5)
    assert not np.allclose(third[1][1], first[1][1], rtol=1e-5)
    with pytest.raises(UniRLError, match=r"asked for 1 row\(s\) after 3.*policy\.reset\(\)"):
        policy.act(batch[0])
    with pytest.raises(UniRLError, match=r"rows of shape \(2,\).*acted on 3 rows"):
        policy.reset(np.array([True, False]))
    policy.reset()
    np.testing.assert_allclose(policy.act(batch[0])[1], first[1][0], rtol=1e-5)


def test_masks_are_asked_for_where_the_run_had_them_and_refused_elsewhere(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", **MATCH, **SPACES["hybrid"])
    observation, _ = run.make_env().reset(seed=0)
    with pytest.raises(UniRLError, match=r"was given no action_mask.*info\[\"action_mask\"\]"):
        run.policy().act(observation)
    other = trained(tmp_path / "other", **MATCH, **{"env.kwargs": {"action": "choice"}})
    observation, _ = other.make_env().reset(seed=0)
    with pytest.raises(UniRLError, match=r"was given an action_mask.*leave action_mask out"):
        other.policy().act(observation, action_mask=[1] * 5)
    for wrong in (observation[:2], {"x": 1}, "word", None, np.ones((2, 3, 4))):
        with pytest.raises(UniRLError, match=r"policy\.act got an observation of") as error:
            other.policy().act(wrong)
        assert len(error.value.parts) == 3


def test_an_empty_mask_is_refused(tmp_path: Path) -> None:
    settings = {"env.kwargs": {"action": "choice", "mask": "info"}}
    run = trained(tmp_path / "run", **MATCH, **settings)
    observation, _ = run.make_env().reset(seed=0)
    for mask in ([0, 0, 1, 0, 0], [1, 0, 0, 0, 0]):
        assert run.policy().act(observation, action_mask=mask) == np.argmax(mask) + 2  # starts at 2
    with pytest.raises(UniRLError, match=r"allows no action"):
        run.policy().act(observation, action_mask=[0] * 5)


def test_each_policy_of_several_acts_for_an_agent(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "run",
        "appo",
        **{**DUEL, "sampler.num_workers": 1, "runner.kind": "inline", "run.total_steps": 2000},
    )
    env, policies = run.make_env(), [run.policy(0), run.policy(1)]
    observations, _ = env.reset(seed=1)
    actions = {
        agent: policy.act(observations[agent])
        for agent, policy in zip(env.agents, policies, strict=True)
    }
    assert all(env.action_space(agent).contains(action) for agent, action in actions.items())
    env.step(actions)
    assert set(run.metrics(1)) and run.metrics(1)["step"][-1] > 0
    with pytest.raises(UniRLError, match=r"learner 2 was asked for.*has 2"):
        run.policy(2)
    with pytest.raises(UniRLError, match=r"cannot be evaluated"):
        run.evaluate(1)


def test_a_simulators_policy_acts_on_the_cpu(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "run",
        "ondevice",
        **{
            "env.id": "torch/CartPole-v1",
            "sim.num_envs": 16,
            "sim.device": "cpu",
            "policy.module": "tests.networks:Whole",
            "run.total_steps": 500,
        },
    )
    env, policy = run.make_env(), run.policy()
    observation, _ = env.reset(seed=1)
    for _ in range(5):
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        assert reward == 1.0 and not terminated and not truncated
    assert len(run.evaluate(3).returns) == 3


def test_atari_is_one_game_with_the_runs_frames() -> None:
    pytest.importorskip("ale_py")
    env = make_one(EnvConfig("ALE/Pong-v5", frame_size=42, frame_stack=2, episodic_life=True))
    observation, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    assert observation.shape == (2, 42, 42) and np.array_equal(observation, again)
    observation, reward, terminated, _, _ = env.step(env.action_space.sample())
    assert env.observation_space.contains(observation) and not terminated and reward == 0.0
    env.close()
