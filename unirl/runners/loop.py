"""The one training loop, whatever is trained and wherever the actors run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from unirl.core.learner import Learner, TimedLearner
from unirl.core.ledger import TicketLedger
from unirl.core.queue import Cursor, QueueServer
from unirl.core.sample import Batch
from unirl.core.weights import WeightStore
from unirl.errors import ActorFailed
from unirl.metrics.metrics import Metrics
from unirl.runners.plan import LearnerPlan, Plan

Agree: TypeAlias = Callable[[str | None], str | None]
Take: TypeAlias = Callable[[], Batch | None]
"""The next batch; None when the loop was stopped meanwhile."""


class Hook(Protocol):
    """Something that happens between updates: log, evaluate, checkpoint, stop."""

    def after_update(self, loop: TrainLoop) -> None:
        """Called when weights are published and the batch is released."""

    def at_end(self, loop: TrainLoop) -> None:
        """Called once when the loop has ended in good order; `loop.reason` says why."""


class TrainLoop:
    """Takes, learns, publishes, releases. `reason` is why it ended, None while it runs.

    agree: where several processes run this loop together: what all of them make of the reason that
    this one has to end; called by each after each update.
    """

    def __init__(
        self,
        plan: Plan,
        learner_plan: LearnerPlan,
        queue: QueueServer,
        weights: WeightStore,
        learner: Learner,
        *,
        agree: Agree | None = None,
    ) -> None:
        self.plan, self.learner_plan = plan, learner_plan
        self.queue, self.weights, self.learner = queue, weights, learner
        self._agree = agree
        self._wish: str | None = None
        self.other_cursors: list[Cursor] = []
        """Of the ranks after the first, as of the newest update; where tickets must not be lost."""
        self.newest_batch: Batch | None = None
        """Of the newest update, for hooks: its times and ages. Its data may be another's by now."""
        self.ledger: TicketLedger | None = None
        """Where tickets are marked that an update has learned from."""
        self.metrics = Metrics()
        self.learning = threading.Lock()
        """Held while the learner changes: other loops may read it meanwhile, never a part of it."""
        self.reason: str | None = None
        self.seconds_before = 0.0
        """Training time of earlier sessions of this run."""
        self._counted: dict[str, float] = {}
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time since the run began, earlier sessions included."""
        return self.seconds_before + time.monotonic() - self._started

    def stop(self, reason: str) -> None:
        """End after this update; the first reason counts. With other ranks, when they agree."""
        if self._agree is None:
            self.reason = self.reason or reason
        else:
            self._wish = self._wish or reason

    @property
    def pool_names(self) -> list[str]:
        """The pools that feed this learner, in the queue's order."""
        return [pool.name for pool in self.plan.pools_of(self.learner_plan)]

    def count_discards(self, discarded: Mapping[str, int], late: int = 0) -> None:
        """Bring the totals up to what the queue counts by reason, which begins at 0 on a resume.
        late: calls with expired leases, likewise.
        """
        counts = {f"queue/discarded/{reason}": number for reason, number in discarded.items()}
        self._count({**counts, "faults/late_calls": late})

    def count_marks(self) -> None:
        """Bring the totals up to what the ledger counts."""
        if self.ledger is not None:
            self._count(self.ledger.stats())

    def _count(self, totals: Mapping[str, float]) -> None:
        for name, number in totals.items():
            if (new := number - self._counted.get(name, 0)) > 0:
                self.metrics.total(name, new)
                self._counted[name] = number

    def run(self, hooks: Sequence[Hook], *, take: Take | None = None) -> None:
        """Train until someone calls `stop`. take: how a runner gets the next batch; the queue's own
        by default.
        """
        run_in_turns([(self, hooks, take or (lambda: self.queue.take(self.learner.version)))])

    def start(self) -> None:
        """Publish the first weights; training time begins."""
        self._started = time.monotonic()
        self.weights.publish(self.learner.weights(), self.learner.version)
        self._stop_when_done()

    def step(self, hooks: Sequence[Hook], take: Take) -> bool:
        """One update and its hooks; False when the loop has ended."""
        if self.reason is not None or not self._update(take):
            return False
        for hook in hooks:
            hook.after_update(self)
        if self._agree is not None and self.reason is None:
            self.reason = self._agree(self._wish)
        return True

    def _update(self, take: Take) -> bool:
        """One update; False when `take` gave up because the loop was stopped while it waited."""
        batch = take()
        if batch is None:
            return False
        started = time.monotonic()
        if isinstance(self.learner, TimedLearner):
            self.learner.record_training_seconds(self.seconds)
        with self.learning:
            found = self.learner.step(batch)
        self.metrics.update(found)
        if self.ledger is not None:
            tickets = [slot.ticket for slot in batch.slots]
            self.ledger.trained(tickets, self.learner.version)
        # Publish first: a released slot is acquired at once, and must see these weights.
        self.weights.publish(self.learner.weights(), self.learner.version)
        self.queue.release(batch)
        self.newest_batch = batch
        self._account(batch, time.monotonic() - started)
        self._stop_when_done()
        return True

    def _stop_when_done(self) -> None:
        run, num_steps = self.plan.run, self.learner.num_steps
        if num_steps >= run.total_steps:
            self.reason = self.reason or "total_steps"  # others count the same steps
        elif run.pause_steps is not None and num_steps >= run.pause_steps:
            self.reason = self.reason or "pause_steps"
        last = self.ledger.num_updates if self.ledger is not None else None
        if last is not None and self.learner.version >= last:
            self.stop("samples")

    def _account(self, batch: Batch, work_seconds: float) -> None:
        metrics = self.metrics
        for age in batch.staleness:
            metrics.mean("staleness/mean", age)
            metrics.maximum("staleness/max", age)
            metrics.interval(f"staleness/age/{age}", 1)
        metrics.interval("time/learner/wait", batch.wait_seconds)
        metrics.interval("time/learner/work", work_seconds)
        metrics.interval("time/actor/wait", sum(slot.wait_seconds for slot in batch.slots))
        metrics.interval("time/actor/work", sum(slot.work_seconds for slot in batch.slots))


def run_in_turns(loops: Sequence[tuple[TrainLoop, Sequence[Hook], Take]]) -> None:
    """Train all loops in this thread, update by update; the first that ends, ends all."""
    for loop, _, _ in loops:
        loop.start()
    try:
        while all(loop.step(hooks, take) for loop, hooks, take in loops):
            pass
    except ActorFailed:
        # The learners are sound: what they learned is saved before the error ends the run.
        for loop, hooks, _ in loops:
            loop.reason = loop.reason or "actor_failed"
            for hook in hooks:
                hook.at_end(loop)
        raise
    ended = next((loop for loop, _, _ in loops if loop.reason is not None), loops[0][0])
    for loop, hooks, _ in loops:
        if loop.reason is None:
            loop.stop(f"learner {ended.learner_plan.name} ended: {ended.reason}")
        for hook in hooks:
            hook.at_end(loop)


def next_multiple(steps: int, every_steps: int) -> int:
    """When something that happens every so many steps is due next."""
    return (steps // every_steps + 1) * every_steps
