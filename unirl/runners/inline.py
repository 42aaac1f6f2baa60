"""The inline runner: actors and learners take turns in one process. Same seed, same weights, bit
for bit; breakpoints work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import cast

from unirl.core.actor import (
    Actor,
    ActorContext,
    AsyncActor,
    JointActor,
    is_async,
    require_one_by_one,
)
from unirl.core.pool import Pool
from unirl.core.queue import QueueClient
from unirl.core.sample import Batch, Slot
from unirl.core.seeding import derive_seed
from unirl.errors import (
    ActorFailed,
    DeadlineExceeded,
    DiscardSlot,
    QueueClosed,
    UniRLError,
    format_error,
)
from unirl.run_events import event
from unirl.runners.async_actors import EventLoop, fill_round
from unirl.runners.config import RunnerConfig
from unirl.runners.loop import Agree, Hook, run_in_turns
from unirl.runners.pipeline import Pipeline, make_pipelines
from unirl.runners.plan import Plan
from unirl.supervision.restarts import Restarts
from unirl.transports.local import LocalTransport

log = logging.getLogger(__name__)


class _Member:
    """One actor of a pool, and the queues that it fills."""

    def __init__(
        self,
        pool: Pool,
        number: int,
        index: int,
        pipelines: Sequence[Pipeline],
        runner: RunnerConfig,
    ) -> None:
        self.pool, self.pool_number, self.index = pool, number, index
        self.pipelines = pipelines
        self.actor: Actor | AsyncActor | JointActor | None = None
        self.clients: list[QueueClient] = []
        self.restarts = Restarts(runner.max_restarts, runner.restart_window_seconds)
        self.join()

    @property
    def name(self) -> str:
        return f"{self.pool.name} {self.index}"

    def join(self) -> None:
        """A member of each queue; whatever it held before is given back."""
        for pipeline, client in zip(self.pipelines, self.clients, strict=False):
            reissue = pipeline.plan.reissue
            pipeline.queue.revoke(client.member, "actor_failed", reissue=reissue)
        self.clients = [
            pipeline.queue.join(pipeline.pools.index(self.pool), self.name)
            for pipeline in self.pipelines
        ]


class InlineRunner:
    """Makes the pieces of a plan in this process and trains.

    rank, agree: where several processes train one policy together, each with actors of its own:
    the number that tells their seeds apart, and see TrainLoop.
    """

    def __init__(self, plan: Plan, *, rank: int = 0, agree: Agree | None = None) -> None:
        self._plan, self._rank = plan, rank
        self._pipelines = make_pipelines(plan, LocalTransport(takes_turns=True), agree=agree)
        self._members = {
            (number, index): _Member(
                pool,
                number,
                index,
                [self._pipelines[i] for i in plan.learners_of(pool)],
                plan.runner,
            )
            for number, pool in enumerate(plan.pools)
            for index in range(pool.bounds[0])
        }
        self._events = EventLoop()
        self.loops = [pipeline.loop for pipeline in self._pipelines]
        self.loop = self.loops[0]

    def run(self, hooks: Sequence[Hook], *others: Sequence[Hook]) -> None:
        """Train until a hook stops a loop. The actors begin from a seed of this version, as after a
        checkpoint. others: the hooks of further learners.
        """
        all_hooks = [hooks, *others, *[()] * (len(self.loops) - 1 - len(others))]
        try:
            self.restart_actors()
            run_in_turns(
                [
                    (pipeline.loop, own, partial(self._take, pipeline))
                    for pipeline, own in zip(self._pipelines, all_hooks, strict=True)
                ]
            )
        finally:
            self.close()

    def restart_actors(self) -> None:
        """Restart all actors from seeds of this version.

        Environments cannot be saved. So at a checkpoint an inline run does what a resumed one must
        do, and both continue alike.
        """
        for member in self._members.values():
            restart = getattr(member.actor, "restart", None)
            try:
                if member.actor is not None and restart is not None:
                    restart(self._seed(member))
                else:
                    self._replace(member, self._seed(member))
            except (UniRLError, QueueClosed):
                raise
            except Exception as error:
                self._restart(member, error)

    def close(self) -> None:
        """Close queues and actors; idempotent."""
        for pipeline in self._pipelines:
            pipeline.queue.close()
        for member in self._members.values():
            self._close_actor(member)
        self._events.close()

    def _take(self, pipeline: Pipeline) -> Batch | None:
        # All slots are filled before each update: with max_staleness k, every sample is k updates
        # old, no more and no less. Unless a batch is enough: then the rest is continued later.
        queue, seconds = pipeline.queue, pipeline.plan.queue.timeout_seconds
        progress, committed = time.monotonic(), -1
        while True:
            while (pool := queue.next_pool()) is not None and not self._has_enough(pipeline):
                if pipeline.loop.reason is not None:
                    return None
                if (total := queue.stats().committed) != committed:
                    progress, committed = time.monotonic(), total
                elif time.monotonic() - progress > seconds:
                    raise ActorFailed(
                        f"no sample was committed for {seconds:g} s",
                        f"all were discarded: {_discards(pipeline)}",
                        "see why the actor discards, or raise queue.timeout_seconds",
                    )
                self._fill_some(self._next_member(pipeline, pool))
            try:
                return queue.take(pipeline.loop.learner.version, 0.0)
            except DeadlineExceeded as deadline:
                # Restored samples may be too old for a smaller max_staleness: fill their slots.
                if queue.next_pool() is None:
                    raise ActorFailed(*deadline.parts) from deadline

    def _next_member(self, pipeline: Pipeline, pool: int) -> _Member:
        """The members of a pool take turns."""
        number = self._plan.pools.index(pipeline.pools[pool])
        index = pipeline.queue.stats().pools[pool].issued % pipeline.pools[pool].bounds[0]
        return self._members[number, index]

    def _has_enough(self, pipeline: Pipeline) -> bool:
        """Whether enough samples are ready for actors that can be interrupted."""
        enough = self._enough(pipeline)
        return enough is not None and pipeline.queue.stats().states["ready"] >= enough

    def _enough(self, pipeline: Pipeline) -> int | None:
        """Ready samples at which actors that can be interrupted are; None: never."""
        config = pipeline.plan.queue
        if config.window is not None or config.max_staleness == 0:
            return None
        number = self._plan.pools.index(pipeline.pools[0])
        actor = self._members[number, 0].actor
        return config.batch_size if actor is not None and is_async(actor) else None

    def _fill_some(self, member: _Member) -> None:
        """One slot of each queue that it fills, or all free ones where it fills many at once."""
        assert member.actor is not None
        if is_async(member.actor):
            self._produce_round(member, member.actor)
            return
        slots = [client.acquire(0.0) for client in member.clients]
        started = time.monotonic()
        try:
            if len(slots) > 1:
                cast(JointActor, member.actor).produce_all(slots)
            else:
                cast(Actor, member.actor).produce(slots[0])
        except DiscardSlot as discard:
            self._discard(member, slots, discard.reason)
            return
        except QueueClosed:
            raise
        except UniRLError as error:
            self._discard(member, slots, "actor_failed")
            raise ActorFailed(*error.parts) from error
        except Exception as error:
            self._discard(member, slots, "actor_failed")
            self._restart(member, error)
            return
        for client, slot in zip(member.clients, slots, strict=True):
            slot.work_seconds = time.monotonic() - started
            client.commit(slot)

    def _discard(self, member: _Member, slots: Sequence[Slot], reason: str) -> None:
        for client, slot in zip(member.clients, slots, strict=True):
            client.discard(slot, reason)

    def _produce_round(self, member: _Member, actor: AsyncActor) -> None:
        pipeline, client = member.pipelines[0], member.clients[0]
        slots = list(iter(client.try_acquire, None))
        round_of_slots = fill_round(
            actor,
            client,
            pipeline.queue,
            slots,
            enough=self._enough(pipeline),
            timeout=pipeline.plan.queue.timeout_seconds,
        )
        try:
            self._events.run(round_of_slots)
        except QueueClosed:
            raise
        except UniRLError as error:
            member.join()
            raise ActorFailed(*error.parts) from error
        except Exception as error:
            member.join()
            self._restart(member, error)

    def _restart(self, member: _Member, error: Exception) -> None:
        """Another actor instead of one that failed, as often as that is allowed."""
        while True:
            about = event("died", member=member.name, cause=format_error(error))
            log.error("%s failed", member.name, exc_info=error, extra=about)
            member.restarts.count(
                f"{member.name} died: {format_error(error)}",
                "full trace: the run's log.txt; fix the environment or actor, then `unirl resume`",
                error,
            )
            self.loop.metrics.total("faults/actor_restarts", 1)
            next_ticket = member.pipelines[0].queue.stats().started
            try:
                # From the ticket, not from how often it failed: a resumed run counts again.
                self._replace(member, derive_seed(self._seed(member), "restart", next_ticket))
                about = event("restarted", member=member.name, cause=format_error(error))
                log.info("%s was started again", member.name, extra=about)
                return
            except (UniRLError, QueueClosed):
                raise
            except Exception as next_error:
                error = next_error

    def _replace(self, member: _Member, seed: int) -> None:
        self._close_actor(member)
        stores = [pipeline.weights for pipeline in member.pipelines]
        context = ActorContext(member.index, seed, stores[0], all_weights=stores)
        actor = require_one_by_one(member.pool.make_actor(context))
        member.actor = actor
        if len(stores) > 1 and not isinstance(actor, JointActor):
            raise UniRLError(
                f"{type(actor).__name__} fills slots of one learner",
                f"pool {member.pool.name!r} feeds {len(stores)}: inline, one actor acts for all",
                "give it produce_all(slots), or set runner.kind to processes",
            )

    def resize(self, pool: Pool, size: int | None) -> None:
        """UniRLError: its members take turns in this process."""
        raise UniRLError(
            f"pool {pool.name!r} is to have {size} members",
            "runner inline has one process, whose members are those of the plan",
            "use runner.kind processes or ray",
        )

    def _close_actor(self, member: _Member) -> None:
        actor, member.actor = member.actor, None
        try:
            if actor is not None and is_async(actor):
                self._events.run(actor.close())
            elif actor is not None:
                actor.close()
        except Exception:
            # Logged, never raised: something more telling is being handled.
            log.exception("%s could not be closed", member.name)

    def _seed(self, member: _Member) -> int:
        own = ("rank", self._rank) if self._rank else ()
        pool = ("pool", member.pool_number) if member.pool_number else ()
        version = self.loop.learner.version
        seed = self._plan.run.seed
        return derive_seed(seed, *pool, "actor", member.index, "version", version, *own)


def _discards(pipeline: Pipeline) -> str:
    discarded = pipeline.queue.stats().discarded
    return ", ".join(f"{number} {reason}" for reason, number in discarded.items() if number)
