"""The ant of IsaacGymEnvs on MuJoCo Warp, its rules against a plain twin in torch. Slow: the model
compiles for half a minute on a bare machine.
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
CPU = torch.device("cpu")


def actions(steps: int, num_envs: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.rand(steps, num_envs, size, generator=generator) - 1


@pytest.fixture(scope="module")
def env() -> Any:
    return make_sim(EnvConfig(id="warp/Ant-isaac"), 64, CPU)


def test_recording_and_single_launches_agree_bit_for_bit(env: Any) -> None:
    plain = make_sim(EnvConfig(id="warp/Ant-isaac", kwargs={"record": False}), 64, CPU)
    assert torch.equal(env.reset(3)[POLICY], plain.reset(3)[POLICY])
    for action in actions(60, 64, 8):
        ours, theirs = env.step(action), plain.step(action)
        assert torch.equal(ours.obs[POLICY], theirs.obs[POLICY])
        assert torch.equal(ours.final_obs[POLICY], theirs.final_obs[POLICY])
        assert torch.equal(ours.reward, theirs.reward)
        assert torch.equal(ours.terminated, theirs.terminated)
        assert torch.equal(ours.valid, theirs.valid)


def isaac_twin(
    qpos: torch.Tensor, qvel: torch.Tensor, last_qpos: torch.Tensor, action: torch.Tensor, env: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward, and observations but for the forces at the feet, straight from the formulas, in
    float64 and with rotation matrices where the kernel has quaternions."""
    qpos, qvel, last_qpos, action = (t.double() for t in (qpos, qvel, last_qpos, action))
    w, x, y, z = qpos[:, 3:7].unbind(1)
    rotation = torch.stack(
        [
            torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], 1),
            torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], 1),
            torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], 1),
        ],
        1,
    )
    low, high = torch.tensor(env.worlds.mjm.jnt_range[1:]).unbind(1)
    local_velocity = torch.einsum("nij,ni->nj", rotation, qvel[:, :3])
    yaw = torch.atan2(rotation[:, 1, 0], rotation[:, 0, 0]) % (2 * torch.pi)
    roll = torch.atan2(rotation[:, 2, 1], rotation[:, 2, 2]) % (2 * torch.pi)
    bearing = torch.atan2(-qpos[:, 2], 1000 - qpos[:, 0]) - yaw
    target = torch.nn.functional.normalize(torch.stack([1000 - qpos[:, 0], -qpos[:, 1]], 1), dim=1)
    up, heading = rotation[:, 2, 2], (rotation[:, :2, 0] * target).sum(1)
    position = (2 * qpos[:, 7:] - high - low) / (high - low)
    obs = torch.cat(
        [
            qpos[:, 2:3],
            local_velocity,
            qvel[:, 3:6],
            torch.stack([yaw, roll, bearing, up, heading], 1),
            position,
            0.2 * qvel[:, 6:],
            torch.zeros(len(qpos), 24, dtype=torch.float64),
            action,
        ],
        1,
    )
    goal = torch.tensor([1000.0, 0.0], dtype=torch.float64)
    potential = [-(goal - q[:, :2]).norm(dim=1) * 60 for q in (qpos, last_qpos)]
    reward = potential[0] - potential[1] + 0.5 + 0.1 * (up > 0.93)
    reward += torch.where(heading > 0.8, torch.full_like(heading, 0.5), 0.5 * heading / 0.8)
    reward -= 0.005 * (action**2).sum(1) + 0.05 * (action * 0.2 * qvel[:, 6:]).abs().sum(1)
    reward -= 0.1 * (position > 0.99).sum(1)
    reward[qpos[:, 2] < 0.31] = -2
    return obs, reward


def test_isaac_observations_and_rewards_follow_the_formulas(env: Any) -> None:
    env.reset(0)
    qpos, qvel = env.worlds.qpos, env.worlds.qvel
    num_falls, compared = 0, 0
    for action in actions(120, 64, 8):
        last_qpos = qpos.clone()
        step = env.step(action)
        stays = ~(step.terminated | step.truncated)  # done rows are reset by now
        obs, reward = isaac_twin(qpos, qvel, last_qpos, action, env)
        ours = step.final_obs[POLICY].clone()
        ours[:, 28:52] = 0
        torch.testing.assert_close(
            ours[stays], obs[stays].float(), rtol=1e-4, atol=1e-4, check_dtype=False
        )
        torch.testing.assert_close(step.reward[stays], reward[stays].float(), rtol=1e-4, atol=1e-4)
        assert (step.reward[step.terminated] == -2).all()
        assert (step.final_obs[POLICY][step.terminated, 0] < 0.31).all()
        num_falls += int(step.terminated.sum())
        compared += int(stays.sum())
    assert num_falls > 0
    assert compared > 5000


def test_an_ant_at_rest_stands_on_its_feet(env: Any) -> None:
    env.reset(0)
    weight = float(env.worlds.mjm.body_mass.sum()) * 9.81
    for _ in range(200):
        env.step(torch.zeros(64, 8))
    forces = env.worlds.obs[:, 28:52].reshape(64, 4, 6)[..., :3] * 10
    # A foot's weight is carried through the leg only where the foot touches; the sum over the feet
    # of the contact forces is the weight of the ant.
    up = forces.norm(dim=-1).sum(1)
    standing = env.worlds.qvel.abs().amax(1) < 0.05
    assert int(standing.sum()) > 32
    assert (up[standing] > 0.95 * weight).all()
    assert (up[standing] < 2.0 * weight).all()


def test_isaac_worlds_start_within_joint_ranges(env: Any) -> None:
    env.reset(1)
    qpos, qvel = env.worlds.qpos, env.worlds.qvel
    low, high = torch.tensor(env.worlds.mjm.jnt_range[1:], dtype=torch.float32).unbind(1)
    assert (qpos[:, 7:] >= low).all()
    assert (qpos[:, 7:] <= high).all()
    assert (qpos[:, :7] == torch.tensor([0, 0, 0.44, 1, 0, 0, 0])).all()
    assert (qvel[:, :6] == 0).all()
    assert 0.09 < float(qvel[:, 6:].abs().max()) <= 0.1
    hips = qpos[:, 7::2]
    assert 0.15 < float(hips.abs().max()) <= 0.2


def test_only_worlds_that_are_done_are_reset(env: Any) -> None:
    env.reset(0)
    for action in actions(5, 64, 8):
        env.step(action)
    env.worlds.qpos[[5, 40], 2] = 0.2
    step = env.step(torch.zeros(64, 8))
    done = torch.zeros(64, dtype=torch.bool)
    done[[5, 40]] = True
    assert torch.equal(step.terminated, done)
    assert torch.equal(step.obs[POLICY][~done], step.final_obs[POLICY][~done])
    assert (step.obs[POLICY][done, 0] == 0.44).all()
    assert (step.obs[POLICY][done, 28:] == 0).all()
    assert (env.worlds.episode_steps == torch.where(done, 0, 6)).all()


def test_a_diverged_world_is_reset_counted_and_leaves_no_trace(env: Any) -> None:
    env.reset(0)
    before = int(env.counters()["nan_states"])
    env.worlds.qpos[7, 2] = float("nan")
    env.worlds.qvel[8, 7] = float("inf")
    step = env.step(torch.zeros(64, 8))
    bad = torch.zeros(64, dtype=torch.bool)
    bad[[7, 8]] = True
    assert torch.equal(step.valid, ~bad)
    assert (step.reward[bad] == 0).all()
    assert not (step.terminated | step.truncated)[bad].any()
    assert torch.isfinite(step.final_obs[POLICY]).all()
    assert torch.isfinite(step.obs[POLICY]).all()
    assert int(env.counters()["nan_states"]) == before + 2
    for action in actions(10, 64, 8):
        assert env.step(action).valid.all()


def test_too_little_room_for_constraints_and_contacts_is_counted(
    env: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    small = make_sim(EnvConfig(id="warp/Ant-isaac", kwargs={"njmax": 4, "nconmax": 1}), 16, CPU)
    capfd.readouterr()
    for each, num_envs in ((small, 16), (env, 64)):
        each.reset(0)
        for action in actions(60, num_envs, 8):
            each.step(action)
    assert int(small.counters()["constraint_overflows"]) > 0
    assert int(small.counters()["contact_overflows"]) > 0
    assert int(env.counters()["constraint_overflows"]) == 0
    assert int(env.counters()["contact_overflows"]) == 0
    assert capfd.readouterr() == ("", "")
