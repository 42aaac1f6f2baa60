"""Canaries: every algorithm learns a bandit, every objective CartPole with actions as tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unirl.llm.algorithms.advantages import advantages
from unirl.llm.algorithms.algorithm import kl_loss, policy_terms
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.presets import PRESETS
from unirl.llm.algorithms.resolve import resolve


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns_a_bandit_of_five_arms(name: str) -> None:
    """Two updates per batch, drawn by an engine that is a little off; the fourth arm is best."""
    generator = torch.Generator().manual_seed(0)
    algorithm = replace(
        resolve(AlgorithmConfig(preset=name), max_tokens=1), norm_tokens=1, overlong_share=0.0
    )
    if algorithm.objective == "gspo":  # bounds for means over long completions
        algorithm = replace(algorithm, clip_low=0.2, clip_high=0.28)
    payoff = torch.tensor([0.1, 0.3, 0.2, 0.9, 0.4])
    logits = torch.zeros(5, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.15)
    group = torch.arange(4).repeat_interleave(8)
    mask, sequence = torch.ones(32, dtype=torch.bool), torch.arange(32)
    for _ in range(40):
        engine = logits.detach() + 0.05 * torch.randn(5, generator=generator)
        arm = torch.multinomial(engine.softmax(-1), 32, replacement=True, generator=generator)
        noise = 0.1 * torch.randn(32, generator=generator)
        old = logits.detach().log_softmax(-1)[arm]
        logp = engine.log_softmax(-1)[arm]
        reference = torch.full((32,), -math.log(5))
        advantage = advantages(
            algorithm,
            payoff[arm] + noise,
            group,
            torch.ones(32),
            mask,
            sequence,
            old_logp=old,
            logp=logp,
            reference=reference,
            value=torch.full((32,), 0.4),
            bootstrap=torch.zeros(32),
        ).token
        for _ in range(2):
            new = logits.log_softmax(-1)[arm]
            loss = policy_terms(
                algorithm, new, old, logp, advantage, mask, sequence, 32
            ).loss.mean()
            if algorithm.kl_coef and algorithm.kl_in == "loss":
                kl = kl_loss(algorithm, new, logp, reference, mask, sequence, 32)
                loss = loss + algorithm.kl_coef * kl.mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert float(logits.detach().softmax(-1)[3]) > 0.8


NUM_EPISODES, LIMIT = 24, 200


def play(policy: torch.nn.Module, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Episodes of CartPole as completions: observations and actions [N], sequence, length [S]."""
    gym = pytest.importorskip("gymnasium", reason="CartPole is Gymnasium's")
    envs = gym.make_vec(
        "CartPole-v1", num_envs=NUM_EPISODES, vectorization_mode="vector_entry_point"
    )
    obs, _ = envs.reset(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    alive = np.ones(NUM_EPISODES, dtype=bool)
    seen, acted, whose = [], [], []
    for _ in range(LIMIT):
        with torch.no_grad():
            chance = policy(torch.from_numpy(obs)).softmax(-1)
        action = torch.multinomial(chance, 1, generator=generator).squeeze(1)
        seen.append(torch.from_numpy(obs)[alive])
        acted.append(action[alive])
        whose.append(torch.arange(NUM_EPISODES)[alive])
        obs, _, terminated, truncated, _ = envs.step(action.numpy())
        alive = alive & ~(terminated | truncated)
        if not alive.any():
            break
    envs.close()
    sequence = torch.cat(whose)
    length = torch.bincount(sequence, minlength=NUM_EPISODES)
    return torch.cat(seen), torch.cat(acted), sequence, length


@pytest.mark.parametrize("objective", ["ppo", "cispo", "gspo", "sapo", "dppo", "reinforce"])
def test_every_objective_learns_cartpole_with_actions_as_tokens(objective: Any) -> None:
    """An episode is a completion of up to 200 tokens, its only reward how long it was."""
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.02)
    algorithm = resolve(AlgorithmConfig(objective=objective, aggregation="token-mean"))
    lengths: list[float] = []
    for update in range(30):
        seen, action, sequence, length = play(policy, update)
        lengths.append(float(length.float().mean()))
        if len(lengths) > 2 and np.mean(lengths[-3:]) > 120:
            break
        with torch.no_grad():
            logp = policy(seen).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        mask = torch.ones(action.numel(), dtype=torch.bool)
        advantage = advantages(
            algorithm,
            length.float() / LIMIT,
            torch.zeros(NUM_EPISODES, dtype=torch.int64),
            torch.ones(NUM_EPISODES),
            mask,
            sequence,
        ).token
        for _ in range(1 if objective == "reinforce" else 2):
            new = policy(seen).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
            loss = policy_terms(
                algorithm, new, logp, logp, advantage, mask, sequence, NUM_EPISODES
            ).loss.mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert lengths[0] < 50
    assert np.mean(lengths[-3:]) > 120
