"""IMPALA: actors unroll the policy over vectorised environments, the learner corrects for their lag
with V-trace.

    vector actors -> slots of T x B -> queue -> V-trace learner -> weights -> vector actors

Espeholt et al., arXiv 1802.01561.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from unirl.actors.evaluate import PolicyEvaluator
from unirl.actors.vector import ActorConfig, make_vector_actor
from unirl.core.queue import QueueConfig
from unirl.envs.config import EnvConfig
from unirl.learners.impala import ImpalaLearnerConfig, ImpalaObjective
from unirl.learners.unroll import check_minibatches
from unirl.policy import PolicyConfig
from unirl.recipes.probe import bind_learner, check_agents, probe
from unirl.runners.plan import Plan, RunConfig, RunnerConfig


@dataclass(frozen=True)
class Config:
    """Everything that can be set for an IMPALA run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    learner: ImpalaLearnerConfig = field(default_factory=ImpalaLearnerConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    run: RunConfig = field(default_factory=RunConfig)


def plan(config: Config) -> Plan:
    """Probe the environment's spaces and bind the pieces; nothing is started."""
    check_minibatches(config.actor.num_envs * config.queue.batch_size, config.learner.minibatches)
    check_agents(config.env, config.actor.num_envs)
    found = probe(config.env, config.policy, config.actor)
    return Plan(
        recipe="impala",
        config=config,
        spec=found.spec,
        queue=config.queue,
        num_actors=config.actor.num_actors,
        make_actor=partial(
            make_vector_actor,
            env=config.env,
            policy=config.policy,
            actor=config.actor,
            gamma=config.learner.gamma,
        ),
        make_learner=bind_learner(config, found, ImpalaObjective),
        runner=config.runner,
        run=config.run,
        make_evaluator=partial(PolicyEvaluator, config.env, config.policy),
        fingerprint=found.fingerprint,
    )
