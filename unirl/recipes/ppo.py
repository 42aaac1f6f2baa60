"""PPO: actors unroll the policy and wait, the learner makes several clipped passes, and they
continue with the new weights.

    vector actors -> slots of T x B -> queue (max_staleness 0) -> PPO learner -> weights -> actors

Schulman et al., arXiv 1707.06347.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unirl.actors.vector import ActorConfig
from unirl.core.queue import QueueConfig
from unirl.envs.config import EnvConfig
from unirl.envs.make import settle_mask
from unirl.learners.config import check_minibatches
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.policy import PolicyConfig
from unirl.policy.precision import settle_dtype
from unirl.population.config import PopulationConfig
from unirl.recipes.defaults import Choices
from unirl.recipes.env_defaults import for_actors
from unirl.recipes.population import with_population
from unirl.recipes.probe import bind_learner, check_agents, probe, vector_plan
from unirl.runners.config import RayConfig, RunConfig, RunnerConfig
from unirl.runners.plan import Plan


@dataclass(frozen=True)
class Config:
    """Everything that can be set for a PPO run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    mix: Mapping[str, float] = field(default_factory=dict)
    """Several environments with equal spaces, by id with their shares of what is learned: each has
    actor.num_actors actors of its own, and env.id is the one that is evaluated. Empty: env.id
    alone.
    """
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    actor: ActorConfig = field(
        default_factory=lambda: ActorConfig(num_actors=1, num_envs=8, unroll_length=128)
    )
    learner: PpoLearnerConfig = field(default_factory=PpoLearnerConfig)
    queue: QueueConfig = field(default_factory=lambda: QueueConfig(max_staleness=0))
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    run: RunConfig = field(default_factory=RunConfig)


def defaults(choices: Choices) -> None:
    """What is set where nobody says anything, by the environment's kind."""
    for_actors(choices, on_policy=True)


def plan(config: Config) -> Plan:
    """Of one policy, or of a population; nothing is started."""
    return with_population(config, _plan_one)


def _plan_one(config: Config) -> Plan:
    """Probe the environment's spaces and bind the pieces; nothing is started."""
    policy = settle_dtype(config.policy, "cpu", config.learner.device)
    config = replace(config, env=settle_mask(config.env), policy=policy)
    check_minibatches(
        config.learner.minibatches,
        config.actor.num_envs * config.queue.batch_size,
        config.actor.unroll_length if config.policy.core == "none" else None,
    )
    check_agents(config.env, config.actor.num_envs)
    on_policy = config.queue.max_staleness == 0
    found = probe(config.env, config.policy, config.actor, on_policy=on_policy)
    return vector_plan("ppo", config, found, bind_learner(config, found, PpoObjective))
