"""Simulators by id: what is found, and what is refused in words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces as gym_spaces

from unirl.envs import catalog
from unirl.envs.config import SIM_FAMILIES, EnvConfig
from unirl.envs.make import known_env_ids, make_vec, spaces
from unirl.envs.sim.families import MODULES, known_ids
from unirl.envs.sim.make import make_device_env
from unirl.errors import UniRLError

CPU = torch.device("cpu")


def test_every_family_has_a_module_and_ids_of_its_own() -> None:
    assert tuple(MODULES) == SIM_FAMILIES
    assert {"torch/Cartpole", "torch/CartPole-v1", "torch/Pendulum", "torch/PointMass"} <= {
        *known_ids()
    }
    assert all(env_id.startswith(SIM_FAMILIES) for env_id in known_ids())
    assert {*known_ids()} <= {*known_env_ids()}


def test_only_simulators_say_that_they_are() -> None:
    assert EnvConfig(id="torch/Cartpole").is_sim
    assert EnvConfig(id="isaaclab/Isaac-Ant-v0").is_sim
    assert not EnvConfig(id="CartPole-v1").is_sim
    assert not EnvConfig(id="ALE/Pong-v5").is_sim


def test_the_task_stands_on_the_device_with_its_time_limit() -> None:
    env = make_device_env(EnvConfig(id="torch/Pendulum", max_episode_steps=7), 3, CPU)
    assert (env.spec.num_envs, env.spec.device, env.spec.max_episode_length) == (3, CPU, 7)
    assert make_device_env(EnvConfig(id="torch/Pendulum"), 3, CPU).spec.max_episode_length == 200


@pytest.mark.parametrize("make", [make_vec, lambda *a: make_device_env(*a, CPU)])
@pytest.mark.parametrize(
    ("env_id", "num_envs", "message"),
    [
        ("torch/Cartpol", 4, 'Did you mean "torch/Cartpole"'),
        ("torch/cartpole-v1", 4, 'Did you mean "torch/CartPole-v1"'),
        ("torch/Cartpole", 0, "num_envs must be at least 1"),
        ("torch/Cartpole", -3, "num_envs must be at least 1"),
    ],
)
def test_wrong_names_and_numbers_are_explained(
    make: Any, env_id: str, num_envs: int, message: str
) -> None:
    with pytest.raises(UniRLError, match=message):
        make(EnvConfig(id=env_id), num_envs)


def test_a_mistyped_family_is_suggested_too() -> None:
    with pytest.raises(UniRLError, match='Did you mean "torch/Pendulum"'):
        make_vec(EnvConfig(id="torhc/Pendulum"), 1)


def test_an_environment_of_gymnasium_is_no_simulator() -> None:
    with pytest.raises(UniRLError, match="its id must begin with one of torch/"):
        make_device_env(EnvConfig(id="CartPole-v1"), 1, CPU)
    with pytest.raises(UniRLError, match="registered with Gymnasium is needed"):
        catalog.find_spec(EnvConfig(id="torch/Cartpole"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_and_absent_is_explained() -> None:
    with pytest.raises(UniRLError, match="no usable CUDA device"):
        make_device_env(EnvConfig(id="torch/Cartpole"), 1, torch.device("cuda"))


@pytest.mark.parametrize("engine", ["vector", "sync", "async", "envpool", "ale"])
def test_only_engine_auto_runs_a_simulator(engine: Any) -> None:
    with pytest.raises(UniRLError, match="only auto fits"):
        EnvConfig(id="torch/Cartpole", engine=engine)


@pytest.mark.parametrize(
    ("env_id", "remedy"),
    [
        ("warp/Cartpole", r"pip install 'unirl\[warp\]'"),
        ("isaacgym/Cartpole", "install Isaac Gym Preview 4"),
        ("isaaclab/Isaac-Cartpole-v0", "install Isaac Lab"),
    ],
)
def test_a_missing_package_names_what_to_install(env_id: str, remedy: str) -> None:
    error = ModuleNotFoundError("No module named 'absent'", name="absent")
    with pytest.raises(UniRLError, match=remedy):
        raise catalog.missing_package(EnvConfig(id=env_id), error)


def test_spaces_are_those_of_one_environment() -> None:
    observation, action = spaces(EnvConfig(id="torch/Cartpole"))
    assert isinstance(observation, gym_spaces.Box)
    assert (observation.shape, action.shape) == ((4,), (1,))
    observation, action = spaces(EnvConfig(id="torch/PointMass"))
    assert isinstance(observation, gym_spaces.Dict)
    assert {name: space.shape for name, space in observation.items()} == {
        "critic": (6,),
        "policy": (4,),
    }
    assert spaces(EnvConfig(id="torch/CartPole-v1"))[1] == gym_spaces.Discrete(2)
