"""The humanoid of IsaacGymEnvs on MuJoCo Warp: where its rules differ from the ant's. Slow: the
model compiles for a minute on a bare machine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY
from unirl.envs.sim.warp.tasks import make_sim

pytest.importorskip("mujoco_warp", reason="needs the extra warp")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_ENVS = 32


@pytest.fixture(scope="module")
def env() -> Any:
    return make_sim(EnvConfig(id="warp/Humanoid-isaac"), NUM_ENVS, torch.device("cpu"))


def test_observations_and_rewards_follow_the_formulas(env: Any) -> None:
    env.reset(0)
    qpos, qvel, mjm = env.worlds.qpos, env.worlds.qvel, env.worlds.mjm
    low, high = torch.tensor(mjm.jnt_range[1:], dtype=torch.float32).unbind(1)
    gear = torch.tensor(mjm.actuator_gear[:, 0], dtype=torch.float32)
    assert gear.tolist()[:9] == [67.5, 67.5, 67.5, 45.0, 45.0, 135.0, 90.0, 22.5, 22.5]
    effort, generator = gear / 135, torch.Generator().manual_seed(0)
    num_falls, num_limits, compared = 0, 0, 0
    for _ in range(60):
        action = 2 * torch.rand(NUM_ENVS, 21, generator=generator) - 1
        last_x, last_y = qpos[:, 0].clone(), qpos[:, 1].clone()
        step = env.step(action)
        obs, stays = step.final_obs[POLICY], ~step.terminated
        position = (2 * qpos[:, 7:] - high - low) / (high - low)
        torch.testing.assert_close(obs[stays, 12:33], position[stays], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(obs[stays, 33:54], 0.1 * qvel[stays, 6:])
        torch.testing.assert_close(obs[stays, 4:7], 0.25 * qvel[stays, 3:6])
        assert torch.equal(obs[:, 87:], action)
        assert (obs[:, 7:10].abs() <= torch.pi + 1e-5).all()
        progress = (qpos[:, 0] - last_x).double() * 60  # the target is far: y counts for nothing
        power = (action * obs[:, 33:54]).abs() * effort
        excess = ((position.abs() - 0.98) / 0.02).clamp(min=0) * effort
        heading = torch.where(obs[:, 11] > 0.8, torch.ones(()), obs[:, 11] / 0.8) * 0.5
        reward = progress + 2.0 + 0.1 * (obs[:, 10] > 0.93) + heading
        reward -= 0.01 * (action**2).sum(1) + 0.05 * power.sum(1) + 0.25 * excess.sum(1)
        sideways = (qpos[:, 1] - last_y).abs() * 60 * 1e-3
        error = (step.reward - reward).abs()[stays]
        assert (error < 2e-3 + 1e-3 * reward.abs()[stays] + sideways[stays]).all()
        assert (step.reward[step.terminated] == -1).all()
        assert (obs[step.terminated, 0] < 0.8).all()
        num_falls += int(step.terminated.sum())
        num_limits += int((excess[stays] > 0).sum())
        compared += int(stays.sum())
    assert num_falls > 0
    assert num_limits > 0
    assert compared > 1000


def test_fresh_worlds_stand_upright_and_have_felt_nothing(env: Any) -> None:
    obs = env.reset(0)[POLICY]
    assert obs.shape == (NUM_ENVS, 108)
    assert torch.isfinite(obs).all()
    assert (obs[:, 0] == torch.tensor(1.34)).all()
    assert (obs[:, 10] == 1).all()
    assert (obs[:, 54:] == 0).all()


def test_a_diverged_world_is_reset_and_leaves_no_trace(env: Any) -> None:
    env.reset(0)
    env.worlds.qvel[3, 10] = float("nan")
    step = env.step(torch.zeros(NUM_ENVS, 21))
    assert step.valid.tolist() == [world != 3 for world in range(NUM_ENVS)]
    assert torch.isfinite(step.obs[POLICY]).all()
    assert torch.isfinite(step.final_obs[POLICY]).all()
    for _ in range(5):
        assert env.step(torch.zeros(NUM_ENVS, 21)).valid.all()
    assert int(env.counters()["nan_states"]) == 1
    assert int(env.counters()["constraint_overflows"]) == 0
