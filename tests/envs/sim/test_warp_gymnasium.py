"""warp/Ant-v5 and warp/HalfCheetah-v5 against Gymnasium's: step for step in the air, statistically
on the ground. Slow: each model compiles for half a minute on a bare machine.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY
from unirl.envs.sim.warp.tasks import make_sim

warp = pytest.importorskip("warp", reason="needs the extra warp")
pytest.importorskip("mujoco_warp", reason="needs the extra warp")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CPU = torch.device("cpu")
HEIGHT = {"Ant-v5": 2, "HalfCheetah-v5": 1}
"""Which coordinate lifts the robot."""


def single(name: str) -> Any:
    return gymnasium.make(name, disable_env_checker=True).unwrapped


def put(env: Any, gym: Any) -> None:
    """Gymnasium's state into every world."""
    env.worlds.qpos[:] = torch.tensor(gym.data.qpos)
    env.worlds.qvel[:] = torch.tensor(gym.data.qvel)
    warp.to_torch(env.worlds.data.xpos)[:] = torch.tensor(gym.data.xpos, dtype=torch.float32)


@pytest.mark.parametrize("name", list(HEIGHT))
def test_steps_in_the_air_are_gymnasiums(name: str) -> None:
    env, gym = make_sim(EnvConfig(id=f"warp/{name}"), 1, CPU), single(name)
    generator = np.random.default_rng(0)
    num_limits = 0
    for seed in range(8):
        env.reset(seed)
        gym.reset(seed=seed)
        qpos, qvel = gym.data.qpos.copy(), gym.data.qvel.copy()
        qpos[HEIGHT[name]] = 3.0
        # Both start from the same float32 numbers.
        gym.set_state(qpos.astype(np.float32).astype(float), qvel.astype(np.float32).astype(float))
        put(env, gym)
        for _ in range(5):
            action = generator.uniform(-1, 1, gym.model.nu).astype(np.float32)
            step = env.step(torch.tensor(action)[None])
            obs, reward, terminated, *_ = gym.step(action)
            expected = torch.tensor(obs, dtype=torch.float32)
            assert gym.data.ncon == 0
            num_limits += int(gym.data.nefc)
            torch.testing.assert_close(step.final_obs[POLICY][0], expected, rtol=1e-5, atol=1e-5)
            assert float(step.reward[0]) == pytest.approx(reward, rel=1e-4, abs=1e-4)
            assert bool(step.terminated[0]) == terminated
            put(env, gym)  # an Ant above 1 m has just been reset
    assert num_limits > 0, "joints at their limits were to be compared, too"


@pytest.mark.parametrize("name", list(HEIGHT))
def test_random_policies_earn_the_same(
    name: str, num_worlds: int = 1024, num_steps: int = 60
) -> None:
    env, gym = make_sim(EnvConfig(id=f"warp/{name}"), num_worlds, CPU), single(name)
    generator = torch.Generator().manual_seed(2)
    env.reset(2)
    ours = torch.zeros(num_worlds, dtype=torch.float64)
    our_ends = 0
    for _ in range(num_steps):
        action = 2 * torch.rand(num_worlds, gym.model.nu, generator=generator) - 1
        step = env.step(action)
        ours += step.reward / num_steps
        our_ends += int(step.terminated.sum())
    numbers = np.random.default_rng(2)
    theirs, their_ends = np.zeros(num_worlds), 0
    for world in range(num_worlds):
        gym.reset(seed=world)
        for _ in range(num_steps):
            action = numbers.uniform(-1, 1, gym.model.nu)
            _, reward, terminated, *_ = gym.step(action)
            theirs[world] += reward / num_steps
            if terminated:
                their_ends += 1
                gym.reset()
    means = float(ours.mean()), float(theirs.mean())
    errors = [float(np.std(x) / np.sqrt(num_worlds)) for x in (ours.numpy(), theirs)]
    print(
        f"{name}, {num_worlds} worlds x {num_steps} steps, reward per step: "
        f"{means[0]:.4f} +- {errors[0]:.4f} (Warp), {means[1]:.4f} +- {errors[1]:.4f} (C); "
        f"ends {our_ends} and {their_ends}"
    )
    assert {key: int(value) for key, value in env.counters().items()} == dict.fromkeys(
        env.counters(), 0
    )
    assert abs(means[0] - means[1]) < 3 * np.hypot(*errors)
    if name == "Ant-v5":
        assert their_ends > 50
        assert abs(our_ends - their_ends) < 4 * np.sqrt(our_ends + their_ends)
