"""torch/PointMass: what is hidden from the policy, and that its goal can be reached."""

from __future__ import annotations

from typing import Any

import torch

from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY
from unirl.envs.sim.torch.env import TorchEnv
from unirl.envs.sim.torch.tasks import make_sim


def make(num_envs: int, **settings: float) -> TorchEnv:
    config = EnvConfig(id="torch/PointMass", kwargs=dict[str, Any](settings))
    return make_sim(config, num_envs, torch.device("cpu"))


def test_the_policy_sees_offset_and_velocity_with_noise_and_no_wind() -> None:
    env = make(5000, noise=0.2)
    obs = env.reset(0)
    for _ in range(3):
        error = obs[POLICY] - obs[CRITIC][:, :4]
        assert error.abs().max() <= 0.2
        assert abs(error.std().item() - 0.2 / 3**0.5) < 0.005
        assert abs(error.mean().item()) < 0.005
        obs = env.step(torch.zeros(5000, 2)).obs


def test_without_noise_both_groups_agree() -> None:
    env = make(8, noise=0.0)
    env.reset(0)
    for _ in range(120):
        step = env.step(torch.ones(8, 2))
        assert torch.equal(step.obs[POLICY], step.obs[CRITIC][:, :4])


def test_the_wind_blows_steadily_through_an_episode_and_turns_with_the_next() -> None:
    env = make(8)
    wind = env.reset(0)[CRITIC][:, 4:].clone()
    for i in range(1, 101):
        step = env.step(torch.zeros(8, 2))
        assert step.final_obs is not None
        assert torch.equal(step.final_obs[CRITIC][:, 4:], wind)
        assert torch.equal(step.obs[CRITIC][:, 4:], wind) == (i < 100)


def test_a_step_follows_its_equation() -> None:
    env = make(1, noise=0.0)
    env.reset(0)
    env.state[:, 0] = torch.tensor([0.5, -1.0, 0.2, 0.4, 0.3, -0.6])
    step = env.step(torch.tensor([[0.5, -3.0]]))
    vx, vy = 0.2 + 0.05 * (4 * 0.5 - 0.2 + 0.3), 0.4 + 0.05 * (4 * -1.0 - 0.4 - 0.6)
    x, y = 0.5 - 0.05 * vx, -1.0 - 0.05 * vy
    assert step.final_obs is not None
    expected = torch.tensor([[x, y, vx, vy, 0.3, -0.6]])
    torch.testing.assert_close(step.final_obs[CRITIC], expected)
    torch.testing.assert_close(step.reward, torch.tensor([1 / (1 + x * x + y * y)]))


def test_who_knows_the_wind_does_better() -> None:
    """A controller on what the critic sees beats the same one on what the policy sees."""
    returns = {}
    for group in (POLICY, CRITIC):
        env = make(500)
        obs = env.reset(0)
        total = torch.zeros(500)
        for _ in range(100):
            seen = obs[group]
            wind = seen[:, 4:] if group == CRITIC else 0.0
            step = env.step((12 * seen[:, :2] - 6 * seen[:, 2:4] - wind) / 4)
            total += step.reward
            obs = step.obs
            assert not step.terminated.any()
        returns[group] = total.mean().item()
    assert returns[CRITIC] > returns[POLICY] > 85
    assert returns[CRITIC] > 90
