"""Simulators on a device, measured: with random actions that cost nothing, and with the plan's
policy; nobody learns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.actors.device import SimConfig
from unirl.bench.errors import Unmeasurable
from unirl.bench.parts import policies_in, section, slot_rows
from unirl.bench.replay import Counter
from unirl.core.actor import ActorContext, AnyActor, is_async
from unirl.core.learner import Learner, LearnerContext
from unirl.core.weights import Weights
from unirl.envs.device import SimSpec
from unirl.policy.policy import ActResult
from unirl.policy.recurrent import State
from unirl.runners.plan import Plan

_NUM_DRAWN = 32
"""Steps whose random actions are drawn in advance, so that drawing them costs nothing."""


def is_simulated(plan: Plan) -> bool:
    """Whether the plan's environments are a simulator on a device."""
    return section(plan.config, SimConfig) is not None


class RandomActions:
    """Stands in for a policy where it acts: uniform actions, drawn once, in turn.

    A recorded graph repeats those of the unroll that was recorded.
    """

    def __init__(self, sim: SimSpec, seed: int) -> None:
        generator = torch.Generator(sim.device).manual_seed(seed % 2**63)
        self._actions = [_draw(sim, generator) for _ in range(_NUM_DRAWN)]
        self._logp = torch.zeros(sim.num_envs, device=sim.device)
        self._next = 0

    def load_weights(self, weights: Weights) -> None:
        """Nothing: nobody decides here."""

    def act(self, obs: Any, state: State, **settings: Any) -> ActResult:
        """See Policy.act."""
        self._next = (self._next + 1) % _NUM_DRAWN
        return ActResult(self._actions[self._next], self._logp, state)


class CountingLearner(Counter):
    """See Counter; its weights are those that the plan's learner begins with, as new versions."""

    def __init__(self, context: LearnerContext, learner: Learner) -> None:
        super().__init__(context)
        self._learner = learner

    def weights(self) -> Weights:
        """See Learner."""
        return self._learner.weights()


def simulation_plan(plan: Plan) -> Plan:
    """The plan that simulates and nothing else. Raises Unmeasurable."""
    slot_rows(plan)
    factory = partial(make_random_actor, make=plan.make_actor)
    return _without_learning(plan, make_actor=factory, make_learner=Counter)


def acting_plan(plan: Plan) -> Plan:
    """The plan that simulates with its policy and does not learn. Raises Unmeasurable."""
    slot_rows(plan)
    return _without_learning(
        plan, make_learner=partial(make_counting_learner, make=plan.make_learner)
    )


def noting_plan(plan: Plan, found: list[SimSpec]) -> Plan:
    """The plan whose actors put what their simulator is into `found`; for this process only."""
    return replace(plan, make_actor=partial(_make_noted, make=plan.make_actor, found=found))


def simulator_in(actor: Any) -> SimSpec:
    """What the simulator is that this actor steps. Raises Unmeasurable when it has none."""
    for value in getattr(actor, "__dict__", {}).values():
        spec = getattr(value, "spec", None)
        if isinstance(spec, SimSpec):
            return spec
    raise Unmeasurable(f"{type(actor).__name__} holds no simulator")


def make_random_actor(
    context: ActorContext, *, make: Callable[[ActorContext], AnyActor]
) -> AnyActor:
    """The plan's own actor with random actions in the place of its policy."""
    actor = make(context)
    try:
        stand_in = RandomActions(simulator_in(actor), context.seed)
        for holder, name, _ in policies_in(actor):
            setattr(holder, name, stand_in)
    except BaseException:
        if not is_async(actor):  # such an actor opens nothing before its first sample
            actor.close()
        raise
    return actor


def make_counting_learner(
    context: LearnerContext, *, make: Callable[[LearnerContext], Learner]
) -> CountingLearner:
    """The factory of a plan: bind all but `context`."""
    return CountingLearner(context, make(context))


def _without_learning(plan: Plan, **changes: Any) -> Plan:
    queue = replace(plan.queue, batch_size=1, max_staleness=plan.queue.num_slots - 1, window=None)
    return replace(plan, queue=queue, **changes)


def _make_noted(
    context: ActorContext,
    *,
    make: Callable[[ActorContext], AnyActor],
    found: list[SimSpec],
) -> AnyActor:
    actor = make(context)
    found.append(simulator_in(actor))
    return actor


def _draw(sim: SimSpec, generator: torch.Generator) -> Tensor:
    space, device = sim.action_space, sim.device
    if isinstance(space, spaces.Discrete):
        return torch.randint(int(space.n), (sim.num_envs,), generator=generator, device=device)
    if not isinstance(space, spaces.Box):
        raise Unmeasurable(f'env "{sim.id}" has actions {space}, of which none can be drawn')
    low, high = (torch.as_tensor(side, device=device) for side in (space.low, space.high))
    # Where there is no bound, actions of a usual size.
    low, high = low.nan_to_num(neginf=-1.0), high.nan_to_num(posinf=1.0)
    unit = torch.rand((sim.num_envs, *space.shape), generator=generator, device=device)
    return low + unit * (high - low)
