"""The one training loop, whatever is trained and wherever the actors run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from unirl.core.learner import Learner, TimedLearner
from unirl.core.metrics import Metrics
from unirl.core.queue import Cursor
from unirl.core.sample import Batch
from unirl.core.slot_queue import SlotQueue
from unirl.core.weights import WeightStore
from unirl.errors import ActorFailed
from unirl.runners.plan import Plan

Agree: TypeAlias = Callable[[str | None], str | None]


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
        queue: SlotQueue,
        weights: WeightStore,
        learner: Learner,
        *,
        agree: Agree | None = None,
    ) -> None:
        self.plan, self.queue, self.weights, self.learner = plan, queue, weights, learner
        self._agree = agree
        self._wish: str | None = None
        self.other_cursors: list[Cursor] = []
        """Of the ranks after the first, as of the newest update; where tickets must not be lost."""
        self.metrics = Metrics()
        self.reason: str | None = None
        self.seconds_before = 0.0
        """Training time of earlier sessions of this run."""
        self._discards: dict[str, int] = {}
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time since the run began, earlier sessions included."""
        return self.seconds_before + time.monotonic() - self._started

    def stop(self, reason: str) -> None:
        """End after the update under way; the first reason counts. With others, when they agree."""
        if self._agree is None:
            self.reason = self.reason or reason
        else:
            self._wish = self._wish or reason

    def count_discards(self, discarded: Mapping[str, int]) -> None:
        """Bring the totals up to what the queue counts by reason, which begins at 0 on a resume."""
        for reason, number in discarded.items():
            if new := number - self._discards.get(reason, 0):
                self.metrics.total(f"queue/discarded/{reason}", new)
        self._discards = dict(discarded)

    def run(
        self,
        hooks: Sequence[Hook],
        *,
        take: Callable[[], Batch | None] | None = None,
    ) -> None:
        """Train until someone calls `stop`. take: how a runner gets the next batch; the queue's own
        by default.
        """
        take = take or (lambda: self.queue.take(self.learner.version))
        self._started = time.monotonic()
        self.weights.publish(self.learner.weights(), self.learner.version)
        self._stop_when_done()
        try:
            while self.reason is None and self._update(take):
                for hook in hooks:
                    hook.after_update(self)
                if self._agree is not None and self.reason is None:
                    self.reason = self._agree(self._wish)
        except ActorFailed:
            # The learner is sound: what it learned is saved before the error ends the run.
            self.reason = self.reason or "actor_failed"
            for hook in hooks:
                hook.at_end(self)
            raise
        for hook in hooks:
            hook.at_end(self)

    def _update(self, take: Callable[[], Batch | None]) -> bool:
        """One update; False when `take` gave up because the loop was stopped while it waited."""
        batch = take()
        if batch is None:
            return False
        started = time.monotonic()
        if isinstance(self.learner, TimedLearner):
            self.learner.record_training_seconds(self.seconds)
        self.metrics.update(self.learner.step(batch))
        # Publish first: a released place is acquired at once, and must see these weights.
        self.weights.publish(self.learner.weights(), self.learner.version)
        self.queue.release(batch)
        self._account(batch, time.monotonic() - started)
        self._stop_when_done()
        return True

    def _stop_when_done(self) -> None:
        if self.learner.num_steps >= self.plan.run.total_steps:
            self.reason = self.reason or "total_steps"  # others count the same steps

    def _account(self, batch: Batch, work_seconds: float) -> None:
        metrics = self.metrics
        for age in batch.staleness:
            metrics.mean("staleness/mean", age)
            metrics.maximum("staleness/max", age)
        metrics.interval("time/learner/wait", batch.wait_seconds)
        metrics.interval("time/learner/work", work_seconds)
        metrics.interval("time/actor/wait", sum(slot.wait_seconds for slot in batch.slots))
        metrics.interval("time/actor/work", sum(slot.work_seconds for slot in batch.slots))
