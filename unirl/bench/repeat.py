"""Learning alone: the plan's learner on one real batch, again and again, and no actor beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unirl.core.learner import Learner, LearnerContext, LearnerState
from unirl.core.metrics import Metrics
from unirl.core.sample import Batch
from unirl.core.tree import tree_map
from unirl.core.weights import Weights
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan

_NUM_REPEATS = 20
"""Updates on one batch before the learner is put back: a policy that moves away from what acted
computes with ever stranger numbers.
"""


class KeepingLearner:
    """The plan's learner; it keeps a copy of the first batch it learned from."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._batch: Batch | None = None
        self._state: LearnerState | None = None
        self._num_repeats = 0

    @property
    def version(self) -> int:
        """See Learner."""
        return self._learner.version

    @version.setter
    def version(self, version: int) -> None:
        self._learner.version = version

    @property
    def num_steps(self) -> int:
        """See Learner."""
        return self._learner.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._learner.num_steps = num_steps

    def step(self, batch: Batch) -> Metrics:
        """See Learner."""
        if self._batch is None:
            for slot in batch.slots:
                slot.wait_ready()
            slots = [replace(slot, data=_copy(slot.data)) for slot in batch.slots]
            self._batch = replace(batch, slots=slots)
        return self._learner.step(batch)

    def repeat(self) -> None:
        """One more update from the batch that was kept."""
        assert self._batch is not None
        if self._state is None:
            self._state = _copy_of(self._learner.state_dict())
        if self._num_repeats == _NUM_REPEATS:
            self._learner.load_state_dict(_copy_of(self._state))
            self._num_repeats = 0
        self._learner.step(self._batch)
        self._num_repeats += 1

    def weights(self) -> Weights:
        """See Learner."""
        return self._learner.weights()

    def state_dict(self) -> LearnerState:
        """See Learner."""
        return self._learner.state_dict()

    def load_state_dict(self, state: LearnerState) -> None:
        """See Learner."""
        self._learner.load_state_dict(state)


class StopWhenAllHaveLearned:
    """Ends the collecting: a hook of every policy's loop."""

    def __init__(self, loops: list[TrainLoop]) -> None:
        self._loops = loops

    def after_update(self, loop: TrainLoop) -> None:
        """See Hook."""
        if all(each.learner.version for each in self._loops):
            loop.stop("collected")

    def at_end(self, loop: TrainLoop) -> None:
        """See Hook."""


def collecting_plan(plan: Plan) -> Plan:
    """The plan with learners that keep a batch."""
    return replace(
        plan,
        make_learner=partial(make_keeping_learner, make=plan.make_learner),
        other_policies=tuple(map(collecting_plan, plan.other_policies)),
    )


def make_keeping_learner(
    context: LearnerContext, *, make: Callable[[LearnerContext], Learner]
) -> KeepingLearner:
    """The factory of a plan: bind all but `context`."""
    return KeepingLearner(make(context))


def _copy_of(state: LearnerState) -> LearnerState:
    return LearnerState(_copy(state.model), _copy(state.optimizer), dict(state.counters))


def _copy(tree: Any) -> Any:
    return tree_map(
        lambda leaf: torch.clone(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree
    )
