"""IMPALA: actors unroll the policy over vectorised environments, the learner corrects for their lag
with V-trace.

    vector actors -> slots of T x B -> queue -> V-trace learner -> weights -> vector actors

Espeholt et al., arXiv 1802.01561.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from unirl.actors.evaluate import make_evaluator
from unirl.actors.vector import ActorConfig, make_vector_actor
from unirl.core.learner import Learner, LearnerContext
from unirl.core.queue import QueueConfig
from unirl.envs.config import EnvConfig
from unirl.learners.config import check_minibatches
from unirl.learners.impala import ImpalaLearnerConfig, ImpalaObjective
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.policy import PolicyConfig
from unirl.policy.precision import settle_dtype
from unirl.recipes.probe import Probe, bind_learner, check_agents, probe
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
    config = replace(config, policy=settle_dtype(config.policy, "cpu", config.learner.device))
    clipped = config.learner.policy_clip is not None
    check_minibatches(
        config.learner.minibatches,
        config.actor.num_envs * config.queue.batch_size,
        config.actor.unroll_length if clipped and config.policy.core == "none" else None,
    )
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
        make_learner=_bind(config, found),
        runner=config.runner,
        run=config.run,
        make_evaluator=partial(make_evaluator, config.env, config.policy),
        fingerprint=found.fingerprint,
    )


def _bind(config: Config, found: Probe) -> Callable[[LearnerContext], Learner]:
    """The learner with the policy gradient, or with the clipped objective where a clip is set."""
    learner = config.learner
    if learner.policy_clip is None:
        return bind_learner(config, found, ImpalaObjective)
    # What IMPALA can be told, PPO can be told too; the rest has no say here.
    clipped: Any = replace(config, learner=PpoLearnerConfig(**vars(learner)))  # type: ignore[arg-type]
    return bind_learner(clipped, found, PpoObjective)
