"""Random unrolls, and learners of each objective to feed them to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from unirl.actors.vector import ActorConfig, unroll_spec
from unirl.core.sample import SampleSpec, Slot
from unirl.core.training_budget import TrainingBudget
from unirl.learners.impala import ImpalaLearnerConfig, ImpalaObjective
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.learners.unroll import UnrollLearner
from unirl.policy import Policy, PolicyConfig

LENGTH, NUM_ENVS = 5, 4
SPACES = (Box(-1, 1, (3,), np.float32), Discrete(3))
OBJECTIVES: dict[str, tuple[type[Any], type[Any]]] = {
    "impala": (ImpalaLearnerConfig, ImpalaObjective),
    "ppo": (PpoLearnerConfig, PpoObjective),
}


class Made(NamedTuple):
    """A learner and what it was made of."""

    learner: UnrollLearner
    policy: Policy
    spec: SampleSpec


@pytest.fixture
def make() -> Callable[..., Made]:
    """A learner of an objective; settings are the learner's, `optimizer` holds the optimiser's."""

    def make_one(
        objective: str,
        batch_size: int = 1,
        core: str = "none",
        normalize_obs: bool = False,
        optimizer: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Made:
        config_type, objective_type = OBJECTIVES[objective]
        policy_config = PolicyConfig(
            hidden=(8,),
            core=core,  # type: ignore[arg-type]
            core_size=4,
            normalize_obs=normalize_obs,
        )
        policy = Policy(*SPACES, policy_config, seed=3)
        spec = unroll_spec(*SPACES, ActorConfig(1, NUM_ENVS, LENGTH), policy.initial_state(1))
        config = config_type(
            optimizer=OptimizerConfig(**{"max_grad_norm": 1e9, **(optimizer or {})}), **settings
        )
        learner = UnrollLearner(
            policy,
            objective_type(policy, config),
            spec,
            config,
            batch_size=batch_size,
            budget=TrainingBudget(1000),
            seed=0,
        )
        return Made(learner, policy, spec)

    return make_one


@pytest.fixture
def random_slot() -> Callable[..., Slot]:
    """A slot of noise with ends of episodes and the fillers after them."""

    def make_one(spec: SampleSpec, seed: int, version: int = 0) -> Slot:
        generator = torch.Generator().manual_seed(seed)
        data = spec.allocate()
        shape = (LENGTH, NUM_ENVS)
        data["obs"].uniform_(-1, 1, generator=generator)
        data["action"].random_(0, 3, generator=generator)
        data["logp"].uniform_(-2, -0.5, generator=generator)
        data["reward"].normal_(generator=generator)
        data["terminated"].copy_(torch.rand(shape, generator=generator) < 0.2)
        for state in data.get("state", {}).values():
            state.uniform_(-1, 1, generator=generator)
        data["mask"][1:] = ~data["terminated"][:-1]  # the row after an end is a filler
        data["mask"][0] = True
        data["terminated"] &= data["mask"]
        return Slot(seed, seed, data, first_version=version, last_version=version)

    return make_one
