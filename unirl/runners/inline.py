"""The inline runner: actors and learner take turns in one process. Same seed, same weights, bit for
bit; breakpoints work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from unirl.core.actor import (
    Actor,
    ActorContext,
    AsyncActor,
    is_async,
    require_one_by_one,
)
from unirl.core.sample import Batch, Slot
from unirl.core.seeding import derive_seed
from unirl.core.slot_queue import LocalQueue
from unirl.core.weights import LocalWeightStore
from unirl.errors import (
    ActorFailed,
    DeadlineExceeded,
    DiscardSlot,
    QueueClosed,
    UniRLError,
    format_error,
)
from unirl.runners.async_actors import EventLoop, fill_round
from unirl.runners.loop import Agree, Hook, TrainLoop
from unirl.runners.plan import Plan

log = logging.getLogger(__name__)


class InlineRunner:
    """Makes the pieces of a plan in this process and trains.

    rank, agree: where several processes train one policy together, each with actors of its own:
    the number that tells their seeds apart, and see TrainLoop.
    """

    def __init__(self, plan: Plan, *, rank: int = 0, agree: Agree | None = None) -> None:
        self._plan, self._rank = plan, rank
        self._weights = LocalWeightStore()
        self._queue = LocalQueue(
            plan.spec, plan.queue, num_actors=plan.num_actors, reasons=plan.reasons
        )
        self._actors: list[Actor | AsyncActor | None] = [None] * plan.num_actors
        self._events = EventLoop()
        self._num_restarts = [0] * plan.num_actors
        learner = plan.make_learner_seeded()
        self.loop = TrainLoop(plan, self._queue, self._weights, learner, agree=agree)
        self.loops = [self.loop]

    def run(self, hooks: Sequence[Hook]) -> None:
        """Train until a hook stops the loop. The actors begin from a seed of this version, as after
        a checkpoint.
        """
        try:
            self.restart_actors()
            self.loop.run(hooks, take=self._take)
        finally:
            self.close()

    def restart_actors(self) -> None:
        """Restart all actors from seeds of this version.

        Environments cannot be saved. So at a checkpoint an inline run does what a resumed one must
        do, and both go on alike.
        """
        for index, actor in enumerate(self._actors):
            restart = getattr(actor, "restart", None)
            try:
                if actor is not None and restart is not None:
                    restart(self._seed(index))
                else:
                    self._replace(index, self._seed(index))
            except (UniRLError, QueueClosed):
                raise
            except Exception as error:
                self._restart(index, error)

    def close(self) -> None:
        """Close queue and actors; idempotent."""
        self._queue.close()
        for index in range(len(self._actors)):
            self._close_actor(index)
        self._events.close()

    def _take(self) -> Batch | None:
        # All places are filled before each update: with max_staleness k, every sample is k updates
        # old, no more and no less. Unless a batch is enough: then the rest is gone on with later.
        progress, committed = time.monotonic(), -1
        while True:
            while self._queue.num_free and not self._has_enough():
                if self.loop.reason is not None:
                    return None
                if self._queue.totals()["committed"] != committed:
                    progress, committed = time.monotonic(), self._queue.totals()["committed"]
                elif time.monotonic() - progress > self._plan.queue.timeout_seconds:
                    raise ActorFailed(
                        f"no sample was committed for {self._plan.queue.timeout_seconds:g} s",
                        f"all were discarded: {self._discards()}",
                        "see why the actor discards, or raise queue.timeout_seconds",
                    )
                self._fill_some()
            try:
                return self._queue.take(self.loop.learner.version, 0.0)
            except DeadlineExceeded as deadline:
                # Restored samples may be too old for a smaller max_staleness: fill their places.
                if not self._queue.num_free:
                    raise ActorFailed(*deadline.parts) from deadline

    @property
    def _enough(self) -> int | None:
        """Ready samples at which actors that can be interrupted are; None: never."""
        config, actor = self._plan.queue, self._actors[0]
        if config.window is not None or config.max_staleness == 0:
            return None
        return config.batch_size if actor is not None and is_async(actor) else None

    def _has_enough(self) -> bool:
        enough = self._enough
        return enough is not None and self._queue.counts()["ready"] >= enough

    def _fill_some(self) -> None:
        """One slot, or all free ones where the actor fills many at once."""
        index = self._queue.next_ticket % self._plan.num_actors
        actor = self._actors[index]
        assert actor is not None
        if is_async(actor):
            self._produce_round(index, actor)
        else:
            self._produce(actor, self._queue.acquire(0.0, actor=index))

    def _produce_round(self, index: int, actor: AsyncActor) -> None:
        queue, config = self._queue, self._plan.queue
        slots = [queue.acquire(0.0, actor=index) for _ in range(queue.num_free)]
        try:
            self._events.run(
                fill_round(actor, queue, slots, enough=self._enough, timeout=config.timeout_seconds)
            )
        except QueueClosed:
            raise
        except UniRLError as error:
            queue.reclaim(index, "actor_failed", reissue=self._plan.reissue)
            raise ActorFailed(*error.parts) from error
        except Exception as error:
            queue.reclaim(index, "actor_failed", reissue=self._plan.reissue)
            self._restart(index, error)

    def _discards(self) -> str:
        return ", ".join(f"{n} {reason}" for reason, n in self._queue.discarded().items() if n)

    def _produce(self, actor: Actor, slot: Slot) -> None:
        started = time.monotonic()
        try:
            actor.produce(slot)
        except DiscardSlot as discard:
            self._queue.discard(slot, discard.reason)
            return
        except QueueClosed:
            raise
        except UniRLError as error:
            self._queue.discard(slot, "actor_failed")
            raise ActorFailed(*error.parts) from error
        except Exception as error:
            self._queue.discard(slot, "actor_failed")
            self._restart(slot.actor, error)
            return
        slot.work_seconds = time.monotonic() - started
        self._queue.commit(slot)

    def _restart(self, index: int, error: Exception) -> None:
        """Another actor in the place of one that failed, as often as that is allowed."""
        while True:
            log.error("actor %d failed", index, exc_info=error)
            if self._num_restarts[index] >= self._plan.runner.max_restarts:
                raise actor_died(index, error, self._plan.runner.max_restarts) from error
            self._num_restarts[index] += 1
            self.loop.metrics.total("faults/actor_restarts", 1)
            try:
                # From the ticket, not from how often it failed: a resumed run counts anew.
                self._replace(
                    index, derive_seed(self._seed(index), "restart", self._queue.next_ticket)
                )
                return
            except (UniRLError, QueueClosed):
                raise
            except Exception as next_error:
                error = next_error

    def _replace(self, index: int, seed: int) -> None:
        self._close_actor(index)
        self._actors[index] = self._make(index, seed)

    def _close_actor(self, index: int) -> None:
        actor, self._actors[index] = self._actors[index], None
        try:
            if actor is not None and is_async(actor):
                self._events.run(actor.close())
            elif actor is not None:
                actor.close()
        except Exception:
            # Logged, never raised: something more telling is being handled.
            log.exception("actor %d could not be closed", index)

    def _make(self, index: int, seed: int) -> Actor | AsyncActor:
        context = ActorContext(index, self._plan.num_actors, seed, self._weights)
        return require_one_by_one(self._plan.make_actor(context))

    def _seed(self, index: int) -> int:
        own = ("rank", self._rank) if self._rank else ()
        return derive_seed(
            self._plan.run.seed, "actor", index, "version", self.loop.learner.version, *own
        )


def actor_died(index: int, error: BaseException, max_restarts: int) -> ActorFailed:
    """The error that ends a run whose actor cannot be kept alive."""
    return ActorFailed(
        f"actor {index} died: {format_error(error)}",
        f"it was restarted {max_restarts} of {max_restarts} times (runner.max_restarts)",
        "full trace: the run's log.txt; mend the environment or actor, then `unirl resume`",
    )
