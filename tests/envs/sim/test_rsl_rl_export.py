"""A simulator as the vector environment of rsl_rl."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.envs.sim.countdown import Countdown
from unirl.envs.config import EnvConfig
from unirl.envs.sim.make import make_device_env
from unirl.errors import UniRLError

pytest.importorskip("tensordict", reason="rsl_rl's observations are TensorDicts")

from unirl.envs.sim.exports.rsl_rl import RslRlExport

CPU = torch.device("cpu")
STAY, BREAK = torch.tensor([[0.0]] * 2), torch.tensor([[0.0], [1.0]])


def sim(task: str, num_envs: int = 4, **fields: Any) -> Any:
    return make_device_env(EnvConfig(id=task, **fields), num_envs, CPU)


def test_it_has_what_rsl_rl_reads() -> None:
    env = RslRlExport(sim("torch/PointMass", 3))
    assert (env.num_envs, env.num_actions, env.max_episode_length) == (3, 2, 100)
    obs = env.get_observations()
    assert obs.batch_size == (3,)
    assert {name: tuple(obs[name].shape) for name in obs.keys()} == {  # noqa: SIM118
        "policy": (3, 4),
        "critic": (3, 6),
    }
    obs, reward, dones, extras = env.step(torch.zeros(3, 2))
    assert (reward.shape, dones.shape, dones.dtype) == ((3,), (3,), torch.int64)
    assert extras["time_outs"].tolist() == [False] * 3


def test_time_limits_are_time_outs_and_failures_are_not() -> None:
    for limit in ("terminate_after", "truncate_after"):
        env = RslRlExport(Countdown(2, **{limit: 2}))  # type: ignore[arg-type]
        env.step(STAY)
        obs, reward, dones, extras = env.step(STAY)
        assert dones.tolist() == [1, 1]
        assert extras["time_outs"].tolist() == [limit == "truncate_after"] * 2
        assert obs["policy"][:, 1].tolist() == [0, 0]
        assert reward.tolist() == [2, 2]


def test_a_lost_row_is_a_time_out_without_reward() -> None:
    env = RslRlExport(Countdown(2))
    _, reward, dones, extras = env.step(BREAK)
    assert reward.tolist() == [1, 0]
    assert dones.tolist() == [0, 1]
    assert extras["time_outs"].tolist() == [False, True]


def test_observations_may_be_kept() -> None:
    env = RslRlExport(sim("torch/Cartpole"))
    first = env.get_observations()
    copy = first["policy"].clone()
    env.step(torch.ones(4, 1))
    assert torch.equal(first["policy"], copy)
    assert not torch.equal(env.get_observations()["policy"], copy)


def test_episode_steps_can_be_set_to_random_phases() -> None:
    env = RslRlExport(sim("torch/Cartpole"))
    env.episode_length_buf = torch.tensor([499, 0, 498, 3])
    dones = [env.step(torch.zeros(4, 1))[2].tolist() for _ in range(2)]
    assert dones == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert env.episode_length_buf.tolist() == [1, 2, 0, 5]


def test_a_simulator_whose_steps_cannot_be_set_says_so() -> None:
    env = RslRlExport(Countdown(2, truncate_after=3))
    env.step(STAY)
    assert env.episode_length_buf.tolist() == [1, 1]
    with pytest.raises(UniRLError, match="init_at_random_ep_len=False"):
        env.episode_length_buf = torch.tensor([1, 2])


def test_what_rsl_rl_cannot_train_on_is_refused() -> None:
    with pytest.raises(UniRLError, match="must be a vector of numbers"):
        RslRlExport(sim("torch/CartPole-v1"))
    with pytest.raises(UniRLError, match="would train on the filler rows"):
        RslRlExport(Countdown(2, autoreset="next_step"))


def test_rsl_rl_trains_on_it() -> None:
    runners = pytest.importorskip("rsl_rl.runners", reason="rsl_rl is installed to compare with")
    model = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu"}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    config = {
        "num_steps_per_env": 8,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 2},
        "actor": {**model, "distribution_cfg": gaussian},
        "critic": dict(model),
    }
    env = RslRlExport(sim("torch/Cartpole", 32))
    runner = runners.OnPolicyRunner(env, config, log_dir=None, device="cpu")
    before = [parameter.clone() for parameter in runner.alg.actor.parameters()]
    runner.learn(2, init_at_random_ep_len=True)
    after = list(runner.alg.actor.parameters())
    assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
