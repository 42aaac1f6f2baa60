"""torch/CartPole-v1 and torch/Pendulum against Gymnasium's own."""

from __future__ import annotations

import gymnasium
import numpy as np
import torch

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY
from unirl.envs.sim.torch.tasks import make_sim

CPU = torch.device("cpu")


def test_cartpole_equals_gymnasium_over_10_000_random_steps() -> None:
    ours = make_sim(EnvConfig(id="torch/CartPole-v1"), 1, CPU)
    theirs = gymnasium.make("CartPole-v1")
    obs, _ = theirs.reset(seed=0)
    ours.reset(0)
    ours.state[:, 0] = torch.from_numpy(theirs.unwrapped.state)  # type: ignore[attr-defined]
    random = np.random.default_rng(0)
    ends = 0
    for i in range(10_000):
        # Sometimes a policy that balances, so that the time limit is compared too.
        action = int(random.integers(2)) if (i // 2_000) % 2 else int(obs[2] + 0.3 * obs[3] > 0)
        obs, reward, terminated, truncated, _ = theirs.step(action)
        step = ours.step(torch.tensor([action]))
        assert step.final_obs is not None
        np.testing.assert_array_equal(step.final_obs[POLICY][0].numpy(), obs)
        assert (step.reward[0], step.terminated[0]) == (reward, terminated)
        assert step.truncated[0] == (truncated and not terminated)
        if terminated or truncated:
            ends += 1
            obs, _ = theirs.reset()
            ours.state[:, 0] = torch.from_numpy(theirs.unwrapped.state)  # type: ignore[attr-defined]
        else:
            assert torch.equal(step.obs[POLICY], step.final_obs[POLICY])
    assert ends > 100


def test_pendulum_follows_gymnasium() -> None:
    ours = make_sim(EnvConfig(id="torch/Pendulum"), 1, CPU)
    theirs = gymnasium.make("Pendulum-v1")
    ours.reset(0)
    random = np.random.default_rng(0)
    for episode in range(5):
        theirs.reset(seed=episode)
        ours.state[:, 0] = torch.from_numpy(theirs.unwrapped.state)  # type: ignore[attr-defined]
        for i in range(200):
            action = random.uniform(-3, 3, 1).astype(np.float32)  # beyond the limits too
            obs, reward, terminated, truncated, _ = theirs.step(action)
            step = ours.step(torch.from_numpy(action)[None])
            assert step.final_obs is not None
            # Two roundings of one chaotic system: compare each step from the same state.
            np.testing.assert_allclose(step.final_obs[POLICY][0].numpy(), obs, atol=2e-5)
            np.testing.assert_allclose(step.reward[0].item(), reward, atol=2e-4)
            assert (step.terminated[0], step.truncated[0]) == (terminated, truncated)
            assert truncated == (i == 199)
            ours.state[:, 0] = torch.from_numpy(theirs.unwrapped.state)  # type: ignore[attr-defined]
