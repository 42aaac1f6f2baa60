"""Asynchronous PPO: environment workers step, policy workers decide for those that wait, and the
learner corrects for their lag with V-trace while the clip bounds each update.

    environment workers <-> policy workers -> slots of T x B -> queue -> PPO learner with V-trace
              ^----- actions -----'                                           |
                            '------------------ weights ---------------------'

Petrenko et al., arXiv 2006.11751; clipped around the newest policy as in arXiv 2110.00641.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from unirl.actors.env_worker import serve_environments
from unirl.actors.evaluate import make_evaluator
from unirl.actors.inference import make_policy_worker
from unirl.actors.sampler import SamplerConfig, check_slots
from unirl.core.pool import Helpers, Pool
from unirl.core.queue import QueueConfig
from unirl.envs.config import EnvConfig
from unirl.envs.make import settle_mask
from unirl.errors import UniRLError
from unirl.handshake.handshake import Handshake
from unirl.learners.config import check_minibatches
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.policy import PolicyConfig
from unirl.policy.precision import settle_dtype
from unirl.population.config import PopulationConfig
from unirl.recipes.defaults import Choices
from unirl.recipes.env_defaults import for_sampler
from unirl.recipes.population import with_population
from unirl.recipes.probe import bind_learner, check_agents, probe
from unirl.runners.config import RayConfig, RunConfig, RunnerConfig
from unirl.runners.plan import LearnerPlan, Plan


@dataclass(frozen=True)
class Config:
    """Everything that can be set for an asynchronous PPO run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    learner: PpoLearnerConfig = field(
        default_factory=lambda: PpoLearnerConfig(epochs=2, minibatches=4)
    )
    queue: QueueConfig = field(
        default_factory=lambda: QueueConfig(batch_size=2, max_staleness=3, window=None)
    )
    runner: RunnerConfig = field(default_factory=lambda: RunnerConfig(kind="processes"))
    ray: RayConfig = field(default_factory=RayConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    run: RunConfig = field(default_factory=RunConfig)


def defaults(choices: Choices) -> None:
    """What is set where nobody says anything, by the environment's kind."""
    for_sampler(choices)


def plan(config: Config) -> Plan:
    """Of one policy, or of a population; nothing is started."""
    return with_population(config, _plan_one)


def _plan_one(config: Config) -> Plan:
    """Probe the environment's spaces and bind the pieces; nothing is started."""
    sampler = config.sampler
    if config.runner.is_inline and sampler.device != "cpu":
        raise UniRLError(
            f"sampler.device is {sampler.device} in the inline runner",
            "without processes there are no policy workers: policies act on the CPU",
            "leave sampler.device out, or set runner.kind to processes",
        )
    devices = sampler.device, config.learner.device
    policy = settle_dtype(config.policy, *devices)
    config = replace(config, env=settle_mask(config.env), policy=policy)
    check_slots(sampler, config.queue)
    check_agents(config.env, sampler.num_envs, sampler.agent_policies)
    learners = tuple(_plan_learner(config, i) for i in range(sampler.num_policies))
    settings: dict[str, Any] = {
        "env": config.env,
        "sampler": sampler,
        "gamma": config.learner.gamma,
    }
    pool = Pool(
        partial(make_policy_worker, policy=config.policy, **settings),
        count=sampler.num_policy_workers,
        learners=tuple(learner.name for learner in learners),
        helpers=Helpers(
            sampler.num_workers,
            partial(Handshake, sampler.layout()),
            partial(serve_environments, **settings),
            config.env.step_timeout,
            cpus=sampler.worker_cpus,
        ),
    )
    return Plan(
        "appo",
        pools=(pool,),
        learners=learners,
        config=config,
        runner=config.runner,
        ray=config.ray,
        run=config.run,
    )


def _plan_learner(config: Config, policy: int) -> LearnerPlan:
    """What one policy needs."""
    sampler = config.sampler
    shape = sampler.shape(policy)
    rows = "sampler.num_envs" if not sampler.agent_policies else f"rows of policy {policy}"
    check_minibatches(
        config.learner.minibatches,
        shape.num_envs * config.queue.batch_size,
        shape.unroll_length if config.policy.core == "none" else None,
        what=f"{rows} * queue.batch_size",
        length="sampler.unroll_length",
    )
    found = probe(config.env, config.policy, shape)
    several = sampler.num_policies > 1
    return LearnerPlan(
        bind_learner(config, found, PpoObjective),
        found.spec,
        config.queue,
        ranks=config.learner.ranks,
        name=f"policy-{policy}" if several else "learner",
        # An evaluation plays every agent with one policy.
        make_evaluator=None if several else partial(make_evaluator, config.env, config.policy),
        fingerprint={**found.fingerprint, **({"policy_index": policy} if several else {})},
    )
