"""A simulator as a vector environment of Gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode

from tests.envs.sim.countdown import Countdown
from unirl.envs.config import EnvConfig
from unirl.envs.sim.exports.gymnasium import GymnasiumExport
from unirl.envs.sim.make import make_device_env

STAY, BREAK = torch.tensor([[0.0]] * 2), torch.tensor([[0.0], [1.0]])


def export(**settings: Any) -> GymnasiumExport:
    env = GymnasiumExport(Countdown(2, **settings))
    env.reset(seed=0)
    return env


def test_it_is_a_vector_environment_with_the_spaces_of_the_task() -> None:
    sim = make_device_env(EnvConfig(id="torch/PointMass"), 3, torch.device("cpu"))
    env = GymnasiumExport(sim)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    obs, info = env.reset(seed=1)
    assert info == {}
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert env.observation_space.contains({name: group.numpy() for name, group in obs.items()})
    assert {name: tuple(group.shape) for name, group in obs.items()} == {
        "policy": (3, 4),
        "critic": (3, 6),
    }
    obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert all(isinstance(x, torch.Tensor) for x in (reward, terminated, truncated))


def test_an_end_brings_final_and_first_observation() -> None:
    env = export(truncate_after=2)
    env.step(STAY)
    obs, reward, terminated, truncated, info = env.step(STAY)
    assert obs.tolist() == [[0, 0], [1, 0]]
    assert info["final_obs"].tolist() == [[0, 2], [1, 2]]
    assert info["_final_obs"].tolist() == [True, True]
    assert reward.tolist() == [2, 2]
    assert truncated.all() and not terminated.any()


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_a_lost_row_is_truncated_where_it_last_was_finite(mode: str) -> None:
    env = export(autoreset=mode)
    env.step(STAY)
    obs, reward, terminated, truncated, info = env.step(BREAK)
    assert reward.tolist() == [2, 0]
    assert truncated.tolist() == [False, True]
    assert not terminated.any()
    final = info["final_obs"] if mode == "same_step" else obs
    assert final.tolist() == [[0, 2], [1, 1]]


def test_the_filler_of_a_next_step_simulator_ends_nothing() -> None:
    env = export(autoreset="next_step", terminate_after=2)
    steps = [env.step(STAY) for _ in range(6)]
    assert [bool(step[2].all()) for step in steps] == [False, True, False] * 2
    assert not any(step[3].any() for step in steps)
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    assert steps[1][0][:, 1].tolist() == [2, 2]
    assert steps[2][0][:, 1].tolist() == [0, 0]
    assert steps[2][1].tolist() == [0, 0]


def test_what_was_given_may_be_kept() -> None:
    env = export(truncate_after=3)
    kept = []
    for _ in range(7):
        obs, reward, terminated, truncated, info = env.step(STAY)
        kept += [(x, x.clone()) for x in (obs, reward, terminated, truncated, info["final_obs"])]
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)


def test_the_same_seed_gives_the_same_episodes() -> None:
    sim = make_device_env(EnvConfig(id="torch/Cartpole"), 4, torch.device("cpu"))
    env = GymnasiumExport(sim)
    first = env.reset(seed=3)[0]
    assert torch.equal(env.reset(seed=3)[0], first)
    assert not torch.equal(env.reset(seed=4)[0], first)
    assert not torch.equal(env.reset()[0], env.reset()[0])


def test_a_list_of_seeds_and_options_are_refused() -> None:
    env = export()
    with pytest.raises(ValueError, match="one seed and no options"):
        env.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="one seed and no options"):
        env.reset(options={"x": 1})


def test_closing_twice_closes_the_simulator_once() -> None:
    sim = Countdown(1)
    env = GymnasiumExport(sim)
    env.close()
    env.close()
    assert sim.closed == 1
