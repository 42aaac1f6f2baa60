"""What recipes over environments share: what must be known before samples can be declared, and the
learner bound to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from gymnasium import Space

from unirl.actors.evaluate import make_evaluator
from unirl.actors.vector import ActorConfig, make_vector_actor, unroll_spec
from unirl.core.learner import Learner, LearnerContext
from unirl.core.pool import Pool
from unirl.core.sample import SampleSpec
from unirl.envs.config import EnvConfig
from unirl.envs.guard import final
from unirl.envs.make import agents_of, spaces
from unirl.errors import UniRLError
from unirl.learners.unroll import make_unroll_learner
from unirl.policy import Policy, PolicyConfig
from unirl.policy.own.network import check_own_networks
from unirl.recipes.mix import env_mix, pool_name
from unirl.runners.plan import LearnerPlan, Plan


@dataclass(frozen=True)
class EnvFacts:
    """Spaces of the environment, content of an unroll, and what a checkpoint must agree on."""

    spaces: tuple[Space[Any], Space[Any]]
    spec: SampleSpec
    fingerprint: Mapping[str, Any]


def probe(
    env: EnvConfig, policy: PolicyConfig, actor: ActorConfig, *, on_policy: bool = False
) -> EnvFacts:
    """Make one environment and one policy, ask them, and let them go. on_policy: what is learned is
    always of the policy that acted, whose values then need not be computed again where that is
    dear.
    """
    with final():
        observation_space, action_space = spaces(env)
    module = Policy(observation_space, action_space, policy, seed=0)
    check_own_networks(module)
    state = module.initial_state(1)
    judged = on_policy and not state and bool(module.inputs.images)
    return EnvFacts(
        spaces=(observation_space, action_space),
        spec=unroll_spec(observation_space, action_space, actor, state, judged=judged),
        fingerprint=fingerprint_of(env.id, (observation_space, action_space), policy),
    )


def vector_plan(
    recipe: str, config: Any, found: EnvFacts, make_learner: Callable[[LearnerContext], Learner]
) -> Plan:
    """The plan of a recipe with vector actors: config has env, mix, policy, actor, learner, queue,
    runner and run.
    """
    sources = env_mix(config.env, config.mix)

    def make_pool(env: EnvConfig, share: float) -> Pool:
        make_actor = partial(
            make_vector_actor,
            env=env,
            policy=config.policy,
            actor=config.actor,
            gamma=config.learner.gamma,
        )
        name = pool_name(env.id, len(sources))
        return Pool(make_actor, name, config.actor.count, share)

    learner = LearnerPlan(
        make_learner,
        found.spec,
        config.queue,
        ranks=config.learner.ranks,
        make_evaluator=partial(make_evaluator, config.env, config.policy),
        fingerprint=found.fingerprint,
    )
    return Plan(
        recipe,
        pools=tuple(make_pool(env, share) for env, share in sources),
        learners=(learner,),
        config=config,
        runner=config.runner,
        ray=config.ray,
        run=config.run,
    )


# Settings that older checkpoints do not name, and what they were made with: left out of a
# fingerprint as long as they are that.
_BEFORE: dict[str, Any] = {"image_stride": 4, "module": "", "kwargs": {}}


def fingerprint_of(
    env_id: str, both: tuple[Space[Any], Space[Any]], policy: PolicyConfig
) -> dict[str, Any]:
    """What a checkpoint must agree on: the environment, both its spaces, and the networks."""
    observation_space, action_space = both
    settings = asdict(policy)
    for name, value in _BEFORE.items():
        if settings[name] == value:
            del settings[name]
    return {
        "env": env_id,
        "observation_space": str(observation_space),
        "action_space": str(action_space),
        "policy": {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
    }


def bind_learner(
    config: Any, found: EnvFacts, objective: Any
) -> Callable[[LearnerContext], Learner]:
    """The factory of a plan's learner. config: a recipe's, with policy, learner, queue and run;
    objective: see make_unroll_learner.
    """
    learner = config.learner
    config.run.check_schedules(
        {
            "learner.optimizer.lr_schedule": learner.optimizer.lr_schedule,
            "learner.entropy_schedule": learner.entropy_schedule,
        }
    )
    return partial(
        make_unroll_learner,
        objective=objective,
        spaces=found.spaces,
        policy=config.policy,
        spec=found.spec,
        learner=learner,
        batch_size=max(1, config.queue.batch_size // learner.ranks),
        budget=config.run.budget,
        num_recent=config.run.target_window,
    )


def check_agents(env: EnvConfig, num_envs: int, agent_policies: tuple[int, ...] = ()) -> None:
    """Raise UniRLError unless the rows are those of whole environments, and every agent of a
    multi-agent environment has a policy. agent_policies: () where one plays all.
    """
    with final():
        agents = agents_of(env)
    if agent_policies and len(agent_policies) != len(agents):
        raise UniRLError(
            f'{len(agent_policies)} agents have a policy, and env "{env.id}" has '
            f"{len(agents) or 'one'}" + (f": {', '.join(agents)}" if agents else ""),
            "sampler.agent_policies names one policy for each agent, in this order",
            f"set sampler.agent_policies to {list(range(len(agents)))}, say"
            if agents
            else "leave sampler.agent_policies out",
        )
    if agents and num_envs % len(agents):
        raise UniRLError(
            f"{num_envs} rows do not split into environments of {len(agents)} agents",
            f"num_envs % {len(agents)} must be 0: each agent is a row",
            f"set num_envs to {-(-num_envs // len(agents)) * len(agents)}",
        )
