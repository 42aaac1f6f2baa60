"""What one learner of a run needs: its queue, its weights, its training loop."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.learner import LearnerContext
from unirl.core.pool import Pool
from unirl.core.queue import QueueServer
from unirl.core.transport import Transport
from unirl.core.weights import WeightStore
from unirl.runners.loop import Agree, TrainLoop
from unirl.runners.plan import LearnerPlan, Plan


@dataclass(frozen=True)
class Pipeline:
    """One learner with all that leads to it and from it."""

    plan: LearnerPlan
    pools: list[Pool]
    """The pools that feed it; a pool's index is its number in the queue."""
    queue: QueueServer
    weights: WeightStore
    loop: TrainLoop

    @property
    def version(self) -> int:
        """Of the learner's weights."""
        return self.loop.learner.version


def make_pipelines(
    plan: Plan, transport: Transport, *, agree: Agree | None = None
) -> list[Pipeline]:
    """One for each learner of the plan."""
    pipelines = []
    for index, each in enumerate(plan.learners):
        pools = plan.pools_of(each)
        shares = [pool.share for pool in pools]
        queue = transport.queue(each.spec, each.queue, shares=shares, reasons=each.reasons)
        learner = each.make(LearnerContext(plan.learner_seed(index)))
        weights = transport.weights(learner.weights())
        loop = TrainLoop(plan, each, queue, weights, learner, agree=agree)
        pipelines.append(Pipeline(each, pools, queue, weights, loop))
    return pipelines
