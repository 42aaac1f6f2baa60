"""The policy of a run, with its weights, out of the plan that trained it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium

from unirl.errors import UniRLError
from unirl.export.act import ActFunction
from unirl.policy import Policy
from unirl.runners.plan import LearnerPlan


@dataclass(frozen=True)
class ExportedPolicy:
    """A policy in float32 on the CPU, and what it is for."""

    policy: Policy
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    def function(self) -> ActFunction:
        """It as a function of plain arrays."""
        return ActFunction(self.policy, self.observation_space, self.action_space)


def exported_policy(learner: LearnerPlan, model: Any, recipe: str) -> ExportedPolicy:
    """learner: as recipes over environments plan it. model: of its checkpoint. Raises UniRLError
    where a plan was made otherwise.
    """
    bound = getattr(learner.make, "keywords", {})
    if not {"spaces", "policy"} <= bound.keys():
        raise UniRLError(
            f'recipe "{recipe}" trained no policy that can be exported',
            "its learner must be bound to spaces and a policy, as recipes over environments do",
            "its checkpoints are safetensors that any reader opens: see checkpoints/latest",
        )
    observation_space, action_space = bound["spaces"]
    config = replace(bound["policy"], compute_dtype="float32")
    policy = Policy(observation_space, action_space, config, seed=0).eval()
    policy.load_weights(learner.weights_in(model))
    return ExportedPolicy(policy, observation_space, action_space)
