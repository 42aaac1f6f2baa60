"""Asynchronous PPO: environment workers step, policy workers decide for whatever is ready, and the
learner corrects for their lag with V-trace while the clip bounds each update.

    environment workers <-> policy workers -> slots of T x B -> queue -> PPO learner with V-trace
              ^----- actions -----'                                           |
                            '------------------ weights ---------------------'

Petrenko et al., arXiv 2006.11751; clipped around the newest policy as in arXiv 2110.00641.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from unirl.actors.env_worker import serve_environments
from unirl.actors.evaluate import make_evaluator
from unirl.actors.inference import make_policy_worker
from unirl.actors.sampler import SamplerConfig, check_places
from unirl.core.env_workers import EnvWorkers
from unirl.core.queue import QueueConfig
from unirl.envs.config import EnvConfig
from unirl.errors import UniRLError
from unirl.learners.config import check_minibatches
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.policy import PolicyConfig
from unirl.policy.precision import settle_dtype
from unirl.recipes.probe import bind_learner, check_agents, probe
from unirl.runners.plan import Plan, RunConfig, RunnerConfig
from unirl.transports.shared import SharedExchange


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
    run: RunConfig = field(default_factory=RunConfig)


def plan(config: Config) -> Plan:
    """Probe the environment's spaces and bind the pieces; nothing is started."""
    sampler = config.sampler
    if config.runner.kind == "inline" and sampler.device != "cpu":
        raise UniRLError(
            f"sampler.device is {sampler.device} in the inline runner",
            "without processes there are no policy workers: policies act on the CPU",
            "leave sampler.device out, or set runner.kind to processes",
        )
    devices = sampler.device, config.learner.device
    config = replace(config, policy=settle_dtype(config.policy, *devices))
    check_places(sampler, config.queue)
    check_agents(config.env, sampler.num_envs, sampler.agent_policies)
    first, *others = [_plan_policy(config, i) for i in range(sampler.num_policies)]
    return replace(first, other_policies=tuple(others))


def _plan_policy(config: Config, policy: int) -> Plan:
    """What one policy needs; that of the first also has what all share."""
    sampler, gamma = config.sampler, config.learner.gamma
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
    return Plan(
        recipe="appo",
        config=config,
        spec=found.spec,
        queue=config.queue,
        num_actors=sampler.num_policy_workers,
        make_actor=partial(
            make_policy_worker, env=config.env, policy=config.policy, sampler=sampler, gamma=gamma
        ),
        make_learner=bind_learner(config, found, PpoObjective),
        runner=config.runner,
        run=config.run,
        # An evaluation plays every agent with one policy.
        make_evaluator=None if several else partial(make_evaluator, config.env, config.policy),
        fingerprint={**found.fingerprint, **({"policy_index": policy} if several else {})},
        env_workers=EnvWorkers(
            sampler.num_workers,
            partial(SharedExchange, sampler.layout()),
            partial(serve_environments, env=config.env, sampler=sampler, gamma=gamma),
            config.env.step_timeout,
        ),
    )
