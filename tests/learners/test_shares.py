"""Shares of a minibatch on threads of their own: what they find is that of one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from unirl.actors.vector import ActorConfig, unroll_spec
from unirl.core.sample import Batch, Slot
from unirl.core.training_budget import TrainingBudget
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.learners.unroll import UnrollLearner
from unirl.policy import Policy, PolicyConfig

SPACES = (Box(0, 255, (2, 36, 36), np.uint8), Discrete(3))
LENGTH, NUM_ENVS = 4, 6


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def learned(core: str = "none", minibatches: int = 2, **settings: Any) -> dict[str, torch.Tensor]:
    """The weights after one batch of noise."""
    policy_config = PolicyConfig(torso="nature", feature_size=16, core=core, core_size=4)  # type: ignore[arg-type]
    policy = Policy(*SPACES, policy_config, seed=3)
    spec = unroll_spec(*SPACES, ActorConfig(1, NUM_ENVS, LENGTH), policy.initial_state(1))
    config = PpoLearnerConfig(epochs=2, minibatches=minibatches, **settings)
    learner = UnrollLearner(
        policy,
        PpoObjective(policy, config),
        spec,
        config,
        batch_size=1,
        budget=TrainingBudget(1000),
        seed=0,
    )
    data, generator = spec.allocate(), torch.Generator().manual_seed(1)
    data["obs"].random_(0, 256, generator=generator)
    data["action"].random_(0, 3, generator=generator)
    data["logp"].fill_(-1.1)
    data["reward"].normal_(generator=generator)
    data["mask"].copy_(torch.rand(LENGTH, NUM_ENVS, generator=generator) < 0.7)
    learner.step(Batch([Slot(0, 0, data)], version=0))
    return learner.state_dict().model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"minibatches": 1},
        {"minibatches": 3, "core": "gru"},
        {"shuffle": "batch"},
        {"minibatches": 6, "core": "gru"},  # of one environment, which cannot be divided
    ],
)
def test_shares_on_threads_find_the_gradient_of_the_whole_minibatch_and_repeat_it(
    threads: Callable[[int], None], settings: dict[str, Any]
) -> None:
    threads(1)
    alone = learned(**settings)
    threads(2)
    first, second = learned(**settings), learned(**settings)
    for name, value in alone.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[name], second[name]), f"{name}: not the same bits again"
    assert any(not torch.equal(first[name], value) for name, value in alone.items()) or (
        settings.get("minibatches") == 6
    ), "nothing was divided"
