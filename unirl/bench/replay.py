"""Sampling alone: the plan's own actors and environments, with actions that cost nothing.

The policy of each actor gives way to a replay of the first actions that it chose itself, before it
learned anything: as good as random, whatever the action space. A learner that only counts takes the
samples, so that nothing but environments and their hand-over is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unirl.bench.parts import policies_in, slot_rows
from unirl.core.actor import ActorContext, AnyActor, is_async
from unirl.core.learner import LearnerContext, LearnerState
from unirl.core.metrics import Metrics
from unirl.core.sample import Batch
from unirl.core.weights import Weights
from unirl.policy import Policy
from unirl.policy.policy import ActResult
from unirl.policy.recurrent import State
from unirl.runners.plan import Plan

_NUM_REMEMBERED = 32
"""Steps whose actions are replayed: enough that environments do not see a rhythm."""


class ReplayPolicy:
    """Stands in for a policy where it acts; remembers one sequence of actions for a group of rows.

    What it does not do itself, the policy does.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._remembered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def load_weights(self, weights: Weights) -> None:
        """Nothing: nobody decides here."""

    def act(self, obs: Any, state: State, **settings: Any) -> ActResult:
        """As Policy.act, from memory once that is full; the state stays as it is."""
        if len(self._remembered) < _NUM_REMEMBERED:
            chosen = self._policy.act(obs, state, **settings)
            self._remembered.append((chosen.action, chosen.logp))
        return self._recall(state)

    def act_groups(
        self, obs: Any, state: State, generators: Sequence[torch.Generator]
    ) -> list[ActResult]:
        """As Policy.act_groups, from memory once that is full; the state stays as it is."""
        if len(self._remembered) < _NUM_REMEMBERED:
            chosen = self._policy.act_groups(obs, state, generators)
            self._remembered += [(one.action, one.logp) for one in chosen]
        size = len(self._remembered[0][1])
        return [
            self._recall({k: value[i * size : (i + 1) * size] for k, value in state.items()})
            for i in range(len(generators))
        ]

    def _recall(self, state: State) -> ActResult:
        self._next = (self._next + 1) % len(self._remembered)
        return ActResult(*self._remembered[self._next], state)


class Counter:
    """A learner that learns nothing and counts samples: rows with a mask, or what `rows` says."""

    def __init__(self, context: LearnerContext) -> None:
        self.version, self.num_steps = 0, 0

    def step(self, batch: Batch) -> Metrics:
        """See Learner."""
        for slot in batch.slots:
            slot.wait_ready()
            counted = slot.data["rows" if "rows" in slot.data else "mask"]
            self.num_steps += int(counted.sum())
        self.version += 1
        return Metrics()

    def weights(self) -> Weights:
        """See Learner: one number, since nobody needs any."""
        return {"none": torch.zeros(1)}

    def state_dict(self) -> LearnerState:
        """See Learner."""
        return LearnerState({}, {})

    def load_state_dict(self, state: LearnerState) -> None:
        """See Learner."""


def make_replaying_actor(
    context: ActorContext, *, make: Callable[[ActorContext], AnyActor]
) -> AnyActor:
    """The plan's own actor with a replay in the place of its policy.

    Raises Unmeasurable when it has no policy.
    """
    actor = make(context)
    try:
        stand_ins: dict[int, ReplayPolicy] = {}
        for holder, name, policy in policies_in(actor):
            setattr(holder, name, stand_ins.setdefault(id(policy), ReplayPolicy(policy)))
    except BaseException:
        if not is_async(actor):  # such an actor opens nothing before its first sample
            actor.close()
        raise
    return actor


def sampling_plan(plan: Plan) -> Plan:
    """The plan that samples and nothing else, in as many processes and as many places.

    Each slot comes back as soon as it is full: nobody waits for a batch. Raises Unmeasurable.
    """
    slot_rows(plan)
    return replace(
        plan,
        queue=replace(
            plan.queue, batch_size=1, max_staleness=plan.queue.num_slots - 1, window=None
        ),
        make_actor=partial(make_replaying_actor, make=plan.make_actor),
        make_learner=Counter,
        other_policies=tuple(map(sampling_plan, plan.other_policies)),
    )
