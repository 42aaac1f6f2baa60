"""IMPALA: actors unroll the policy over vectorised environments, the learner corrects for their lag
with V-trace.

    vector actors -> slots of T x B -> queue -> V-trace learner -> weights -> vector actors

Espeholt et al., arXiv 1802.01561.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unirl.actors.vector import ActorConfig
from unirl.core.learner import Learner, LearnerContext
from unirl.core.queue import QueueConfig
from unirl.envs.config import EnvConfig
from unirl.envs.make import settle_mask
from unirl.learners.config import check_minibatches
from unirl.learners.impala import ImpalaLearnerConfig, ImpalaObjective
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.policy import PolicyConfig
from unirl.policy.precision import settle_dtype
from unirl.population.config import PopulationConfig
from unirl.recipes.defaults import Choices
from unirl.recipes.env_defaults import for_actors
from unirl.recipes.population import with_population
from unirl.recipes.probe import EnvFacts, bind_learner, check_agents, probe, vector_plan
from unirl.runners.config import RayConfig, RunConfig, RunnerConfig
from unirl.runners.plan import Plan


@dataclass(frozen=True)
class Config:
    """Everything that can be set for an IMPALA run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    mix: Mapping[str, float] = field(default_factory=dict)
    """Several environments with equal spaces, by id with their shares of what is learned: each has
    actor.num_actors actors of its own, and env.id is the one that is evaluated. Empty: env.id
    alone.
    """
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    learner: ImpalaLearnerConfig = field(default_factory=ImpalaLearnerConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    run: RunConfig = field(default_factory=RunConfig)


def defaults(choices: Choices) -> None:
    """What is set where nobody says anything, by the environment's kind."""
    for_actors(choices, on_policy=False)


def plan(config: Config) -> Plan:
    """Of one policy, or of a population; nothing is started."""
    return with_population(config, _plan_one)


def _plan_one(config: Config) -> Plan:
    """Probe the environment's spaces and bind the pieces; nothing is started."""
    policy = settle_dtype(config.policy, "cpu", config.learner.device)
    config = replace(config, env=settle_mask(config.env), policy=policy)
    clipped = config.learner.policy_clip is not None
    check_minibatches(
        config.learner.minibatches,
        config.actor.num_envs * config.queue.batch_size,
        config.actor.unroll_length if clipped and config.policy.core == "none" else None,
    )
    check_agents(config.env, config.actor.num_envs)
    found = probe(config.env, config.policy, config.actor)
    return vector_plan("impala", config, found, _bind(config, found))


def _bind(config: Config, found: EnvFacts) -> Callable[[LearnerContext], Learner]:
    """The learner with the policy gradient, or with the clipped objective where a clip is set."""
    learner = config.learner
    if learner.policy_clip is None:
        return bind_learner(config, found, ImpalaObjective)
    # PPO has all of IMPALA's settings; its further ones have no effect here.
    clipped: Any = replace(config, learner=PpoLearnerConfig(**vars(learner)))  # type: ignore[arg-type]
    return bind_learner(clipped, found, PpoObjective)
