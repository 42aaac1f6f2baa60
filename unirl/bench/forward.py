"""Inference alone: forward passes of the plan's policy over as many rows as it acts on, in as many
processes as hold one, and no environment.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from unirl.actors.sampler import SamplerConfig
from unirl.bench.parts import policies_in, section, slot_rows
from unirl.bench.replay import Counter
from unirl.core.actor import ActorContext
from unirl.core.learner import Learner, LearnerContext
from unirl.core.queue import QueueConfig
from unirl.core.sample import Field, SampleSpec, Slot
from unirl.core.tree import unflatten
from unirl.core.weights import Weights
from unirl.policy import Policy
from unirl.runners.plan import Plan

_SLOT_SECONDS = 0.02
"""How long one slot's forward passes take: long beside what handing it over costs."""


@dataclass(frozen=True)
class Rows:
    """What one forward pass is over."""

    num_rows: int
    """Environments of one group."""
    num_groups: int
    """Groups that are decided for together, each with random numbers of its own; 0: no groups."""
    device: str

    @property
    def total(self) -> int:
        """Environments of one forward pass."""
        return self.num_rows * max(1, self.num_groups)


class ForwardActor:
    """See Actor: its samples are numbers of rows that were decided for."""

    def __init__(self, context: ActorContext, policy: Policy, spec: SampleSpec, rows: Rows) -> None:
        self._policy, self._rows, self._weights = policy, rows, context.weights
        self._version = -1
        self._obs = _observations(spec, rows)
        self._state = {
            name: value.to(rows.device) for name, value in policy.initial_state(rows.total).items()
        }
        self._generators = [
            torch.Generator(device=rows.device).manual_seed(context.seed % 2**31 + i)
            for i in range(max(1, rows.num_groups))
        ]

    def load_weights(self, weights: Weights) -> None:
        """Nothing: there are none to learn."""

    def produce(self, slot: Slot) -> None:
        """See Actor."""
        self._version = self._weights.pull(self, self._version)
        slot.first_version = slot.last_version = self._version
        num_rows, started = 0, time.monotonic()
        while time.monotonic() - started < _SLOT_SECONDS:
            self._act()
            num_rows += self._rows.total
        slot.data["rows"].fill_(num_rows)

    def _act(self) -> None:
        if self._rows.num_groups:
            self._policy.act_groups(self._obs, self._state, self._generators)
        else:
            self._policy.act(self._obs, self._state, generator=self._generators[0])
        if self._rows.device != "cpu":
            torch.cuda.synchronize(self._rows.device)

    def close(self) -> None:
        """See Actor."""


def make_forward_actor(
    context: ActorContext,
    *,
    make_learner: Callable[[LearnerContext], Learner],
    spec: SampleSpec,
    rows: Rows,
) -> ForwardActor:
    """The factory of a plan. Raises Unmeasurable when the learner has no policy."""
    # The learner's, as an actor's comes with environments.
    (_, _, policy), *_ = policies_in(make_learner(LearnerContext(context.seed)))
    return ForwardActor(context, copy.deepcopy(policy).eval().to(rows.device), spec, rows)


def inference_plan(plan: Plan, rows_per_forward: float | None = None) -> Plan:
    """The plan that decides and nothing else. Raises Unmeasurable.

    rows_per_forward: what was measured, where a policy worker takes whatever is ready.
    """
    in_groups = plan.env_workers is not None and plan.runner.kind == "processes"
    sampler = section(plan.config, SamplerConfig)
    device = sampler[1].device if in_groups and sampler is not None else "cpu"

    def inferring(each: Plan) -> Plan:
        num_rows = slot_rows(each)
        num_groups = max(1, round((rows_per_forward or num_rows) / num_rows)) if in_groups else 0
        factory = partial(
            make_forward_actor,
            make_learner=each.make_learner,
            spec=each.spec,
            rows=Rows(num_rows, num_groups, device),
        )
        return replace(
            each,
            spec=SampleSpec({"rows": Field((1,), torch.int64, batch_axis=0)}),
            queue=QueueConfig(batch_size=1, max_staleness=2 * plan.num_actors - 1, window=None),
            make_actor=factory,
            make_learner=Counter,
            env_workers=None,
            other_policies=tuple(map(inferring, each.other_policies)),
        )

    return inferring(plan)


def _observations(spec: SampleSpec, rows: Rows) -> Any:
    """Noise for images and numbers, 0 for what is counted: that is within every space."""
    flat = {}
    for name, item in spec.fields.items():
        if name.split("/")[0] != "obs":
            continue
        obs = torch.zeros((rows.total, *item.shape[2:]), dtype=item.dtype)
        if item.dtype == torch.uint8:
            obs.random_(0, 256)
        elif item.dtype.is_floating_point:
            obs.normal_()
        flat[name] = obs.to(rows.device)
    return unflatten(flat)["obs"]
