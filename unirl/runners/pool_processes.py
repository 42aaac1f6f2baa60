"""The processes of a run's pools: their members, and the helpers of these. They join and leave the
queues, are killed where they hang, and are started again where they died.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from unirl.core.actor import ActorContext
from unirl.core.pool import HelperContext, HelperHandshake, Pool
from unirl.core.queue import MemberStatus, QueueClient, QueueStats, SlotBuffers
from unirl.core.seeding import derive_seed
from unirl.core.transport import Transport
from unirl.core.weights import WeightStore
from unirl.errors import LockHeld, UniRLError
from unirl.host import is_stopped
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import LearnerPlan, Plan
from unirl.runners.run_actor import run_actor
from unirl.supervision.pauses import Pauses
from unirl.supervision.restarts import Restarts
from unirl.supervision.supervisor import KillReason, Supervisor, WorkerProcess

log = logging.getLogger(__name__)


class MemberQueue(Protocol):
    """What the processes of members need of a QueueServer."""

    @property
    def closed(self) -> bool: ...
    def join(self, pool: int = 0, name: str = "") -> QueueClient: ...
    def revoke(self, member: int, reason: str = "actor_died", *, reissue: bool = False) -> int: ...
    def retire(self, member: int) -> None: ...
    def members(self) -> list[MemberStatus]: ...
    def buffers(self) -> SlotBuffers: ...
    def stats(self) -> QueueStats: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...


class MemberPipeline(Protocol):
    """What they need of a Pipeline; of one whose learner is on another machine, too."""

    @property
    def plan(self) -> LearnerPlan: ...
    @property
    def pools(self) -> list[Pool]: ...
    @property
    def queue(self) -> MemberQueue: ...
    @property
    def weights(self) -> WeightStore: ...
    @property
    def version(self) -> int:
        """Of the weights that members begin with."""


class PoolProcesses:
    """One pool of a plan, as processes.

    Its actors are numbered through, learner by learner: actor = learner * members + index.
    numbers: of those that run here; None: all. earlier: how often others ran before them under
    these numbers, somewhere else: none repeats what they drew.
    """

    def __init__(
        self,
        plan: Plan,
        number: int,
        pipelines: Sequence[MemberPipeline],
        transport: Transport,
        numbers: Sequence[int] | None = None,
        earlier: int = 0,
    ) -> None:
        self.pool, self._plan, self._number = plan.pools[number], plan, number
        self._earlier = earlier
        self.pipelines = [pipelines[i] for i in plan.learners_of(self.pool)]
        helpers, self._runner = self.pool.helpers, plan.runner
        self.handshake: HelperHandshake | None = None
        if helpers is not None and (numbers is None or numbers):
            self.handshake = helpers.make_handshake(transport)
        self.members: dict[WorkerProcess, int] = {}
        """The number that each process's actor has joined its queue with."""
        if numbers is None:
            numbers = range(len(self.pipelines) * self.pool.bounds[0])
        self.actors = [self._actor(i) for i in numbers]
        self.workers: list[WorkerProcess] = []
        if helpers is not None and self.handshake is not None:
            workers_of = self.handshake.layout.workers_of
            self.workers = [
                self._process(helpers.role, i, partial(self._helper_work, i))
                for i in sorted({worker for number in numbers for worker in workers_of(number)})
            ]
        self._late: set[int] = set()

    def _process(
        self, role: str, index: int, make_work: Callable[[], Callable[[], None]], threads: int = 1
    ) -> WorkerProcess:
        restarts = Restarts(self._runner.max_restarts, self._runner.restart_window_seconds)
        return WorkerProcess(role, index, make_work, restarts, threads, self._runner.actor_niceness)

    def _actor(self, number: int) -> WorkerProcess:
        work = partial(self._actor_work, number)
        return self._process(self.pool.name, number, work, self._runner.actor_threads)

    def _worker(self, index: int) -> WorkerProcess:
        return next(worker for worker in self.workers if worker.index == index)

    def _find(self, number: int) -> tuple[MemberPipeline, int, int]:
        """The pipeline of an actor, its learner's index here, and its own among that learner's."""
        if len(self.pipelines) == 1:
            return self.pipelines[0], 0, number
        learner, index = divmod(number, self.pool.bounds[0])
        return self.pipelines[learner], learner, index

    def _seed(self, number: int, num_restarts: int) -> int:
        """An actor's seed; the first is what the inline runner would give it."""
        counts = {"restart": num_restarts, "earlier": self._earlier}
        path = [part for count in counts.items() if count[1] for part in count]
        pool = ("pool", self._number) if self._number else ()
        version = self.pipelines[0].version
        seed = self._plan.run.seed
        return derive_seed(seed, *pool, "actor", number, "version", version, *path)

    def _actor_work(self, number: int) -> Callable[[], None]:
        """Joins the queue: once for each start."""
        pipeline, learner, index = self._find(number)
        process = next(actor for actor in self.actors if actor.index == number)
        context = ActorContext(
            index,
            self._seed(number, process.restarts.total),
            pipeline.weights,
            learner,
            handshake=self.handshake,
        )
        client = pipeline.queue.join(pipeline.pools.index(self.pool), process.name)
        self.members[process] = client.member
        return partial(run_actor, self.pool.make_actor, context, client, self._runner.hang_seconds)

    def _helper_work(self, index: int) -> Callable[[], None]:
        assert self.pool.helpers is not None and self.handshake is not None
        numbers = self.handshake.layout.actors_of(index)
        # It is also started again with each of its actors.
        restarts = self._worker(index).restarts.total
        restarts += sum(actor.restarts.total for actor in self.actors if actor.index in numbers)
        seed = derive_seed(self._seed(numbers[0], restarts), "worker", index)
        slots = [pipeline.queue.buffers() for pipeline in self.pipelines]
        context = HelperContext(index, seed, self.handshake, slots)
        return partial(self.pool.helpers.serve, context)

    def resize(self, size: int, supervisor: Supervisor) -> None:
        """Start or retire actors until so many run for each learner. One that retires finishes what
        it holds.
        """
        check_size(self._plan, self.pool, size)
        running = [actor.index for actor in self.actors if actor.retired_at is None]
        first = 1 + max(actor.index for actor in self.actors)
        new = range(first, first + size - len(running))
        self.assign([*running[:size], *new], supervisor)

    def assign(self, numbers: Sequence[int], supervisor: Supervisor) -> None:
        """Let exactly these actors run: others retire."""
        running = [actor for actor in self.actors if actor.retired_at is None]
        for actor in running:
            if actor.index not in numbers:
                actor.retired_at = time.monotonic()
                if actor in self.members:
                    self.pipelines[0].queue.retire(self.members[actor])
        for number in numbers:
            if all(actor.index != number for actor in self.actors):
                self.actors.append(self._actor(number))
                supervisor.add(self.actors[-1])

    def dependants(self, process: WorkerProcess) -> list[WorkerProcess]:
        """Helpers that cannot continue without their actor."""
        if self.handshake is None or process in self.workers:
            return []
        return [self._worker(index) for index in self.handshake.layout.workers_of(process.index)]

    def on_exit(self, process: WorkerProcess, dependants: Sequence[WorkerProcess]) -> str:
        """Give back what it held."""
        for worker in dependants:
            self._late.discard(worker.index)
        if process in self.workers:
            assert self.handshake is not None
            reason = "timeout" if process.index in self._late else "actor_died"
            self._late.discard(process.index)
            self.handshake.worker_died(process.index, reason)
            return "its unfinished slots are discarded"
        if self.handshake is not None:
            self.handshake.actor_died(process.index)
        if process.retired_at is not None:
            self.actors.remove(process)
            for worker in dependants:
                worker.retired_at = process.retired_at
        pipeline = self._find(process.index)[0]
        reissue, member = pipeline.plan.reissue, self.members.pop(process)
        number = pipeline.queue.revoke(member, reissue=reissue)
        return f"{number} unfinished slot(s) {'issued again' if reissue else 'discarded'}"

    def kill_hung(self, pauses: Pauses) -> None:
        """Kill actors that give no sign of life though they hold slots or were stopped, and helpers
        that owe a step. pauses: when they could not.
        """
        seconds = self._runner.hang_seconds
        limit = seconds + pauses.within(seconds)
        idle = {
            (pipeline.plan.name, status.member): bool(status.num_running)
            for pipeline in self.pipelines
            for status in pipeline.queue.members()
            if status.idle_seconds > limit
        }
        for actor in self.actors:
            member = self.members.get(actor, 0)
            pipeline = self._find(actor.index)[0]
            holds = idle.get((pipeline.plan.name, member))
            # One without a slot may be waiting for its turn; a stopped one never takes it.
            hangs = holds or (holds is not None and actor.pid is not None and is_stopped(actor.pid))
            if actor.retired_at is not None:
                hangs = time.monotonic() - actor.retired_at > limit
            if hangs and actor.alive and not actor.kill_reason:
                log.warning("%s hangs, killed: %s", actor.name, pipeline.queue.describe())
                actor.kill(
                    KillReason(
                        f"it {'held a slot' if holds else 'was stopped'} without a sign of life "
                        f"for longer than runner.hang_seconds, {seconds:g} s",
                        "raise runner.hang_seconds, or make unrolls shorter",
                    )
                )
        self._kill_late_helpers(pauses)

    def _kill_late_helpers(self, pauses: Pauses) -> None:
        helpers = self.pool.helpers
        if helpers is None or self.handshake is None:
            return
        seconds = helpers.step_timeout
        for index in self.handshake.late_workers(seconds + pauses.within(seconds)):
            worker = self._worker(index)
            if index not in self._late and worker.alive:
                log.warning("%s owes a step for %g s: killed", worker.name, seconds)
                self._late.add(index)
                worker.kill(
                    KillReason(
                        f"it owed a step for longer than env.step_timeout, {seconds:g} s",
                        "raise env.step_timeout, or see why the environment hangs",
                    )
                )


def check_size(plan: Plan, pool: Pool, size: int) -> None:
    """UniRLError unless the pool may have so many members: as many as its bounds say, or, where
    it has none and each member stands alone, as there are slots.
    """
    low, high = pool.bounds
    learners = plan.learners_of(pool)
    if isinstance(pool.count, int) and pool.helpers is None:
        others = sum(each.bounds[0] for each in plan.pools_of(plan.learners[learners[0]]))
        low, high = 1, plan.learners[learners[0]].queue.num_slots - others + pool.count
    if not low <= size <= high or len(learners) > 1:
        raise UniRLError(
            f"pool {pool.name!r} is to have {size} members",
            f"its plan allows {low} to {high}, of one learner: each needs a slot",
            "choose another size, or a larger queue.batch_size or queue.max_staleness",
        )


def modules_of(plan: Plan) -> tuple[list[str], list[str]]:
    """What the processes of a plan's pools import, see process_context."""
    factories: list[Any] = [pool.make_actor for pool in plan.pools]
    factories += [pool.helpers.serve for pool in plan.pools if pool.helpers is not None]
    modules = [getattr(factory, "func", factory).__module__ for factory in factories]
    return modules, [name for pool in plan.pools for name in pool.preload]


class AllProcesses:
    """All pools of a run under one supervisor. Also a hook, for the log.

    numbers: of the members of each pool that run here; None: all of them. earlier: see
    PoolProcesses.
    """

    def __init__(
        self,
        plan: Plan,
        pipelines: Sequence[MemberPipeline],
        transport: Transport,
        log_dir: Path | None,
        numbers: Sequence[Sequence[int]] | None = None,
        earlier: int = 0,
    ) -> None:
        self._pipelines, self._num_counted = pipelines, 0
        here = [None] * len(plan.pools) if numbers is None else numbers
        self.pools = [
            PoolProcesses(plan, i, pipelines, transport, here[i], earlier)
            for i in range(len(plan.pools))
        ]
        modules, preload = modules_of(plan)
        self.supervisor = Supervisor(
            [process for pool in self.pools for process in (*pool.actors, *pool.workers)],
            self,
            log_dir=log_dir,
            modules=modules,
            preload=preload,
        )
        transport.end_lock_holders_by(self._kill_holder)

    def start(self) -> None:
        """Start all of them."""
        self.supervisor.start()

    def close(self) -> None:
        """End all of them; idempotent."""
        self.supervisor.close()

    def raise_error(self) -> None:
        """Raise what made one stop for good, if anything did."""
        self.supervisor.raise_error()

    @property
    def num_restarts(self) -> int:
        """How often processes died and were replaced."""
        return self.supervisor.num_restarts

    def resize(self, pool: Pool, size: int) -> None:
        """See ProcessesRunner."""
        found = next(each for each in self.pools if each.pool is pool)
        found.resize(size, self.supervisor)

    def actor_pids(self) -> list[int | None]:
        """Process ids of the actors, pool by pool."""
        return [actor.pid for pool in self.pools for actor in pool.actors]

    def helper_pids(self) -> list[int | None]:
        """Process ids of the environment workers and other helpers, pool by pool."""
        return [worker.pid for pool in self.pools for worker in pool.workers]

    def _pool_of(self, process: WorkerProcess) -> PoolProcesses:
        return next(pool for pool in self.pools if process in (*pool.actors, *pool.workers))

    def dependants(self, process: WorkerProcess) -> list[WorkerProcess]:
        return self._pool_of(process).dependants(process)

    def on_exit(self, process: WorkerProcess, dependants: Sequence[WorkerProcess]) -> str:
        return self._pool_of(process).on_exit(process, dependants)

    def check(self) -> None:
        for pool in self.pools:
            pool.kill_hung(self.supervisor.pauses)

    def progress(self) -> int:
        return sum(pipeline.queue.stats().committed for pipeline in self._pipelines)

    def close_all(self) -> None:
        for pipeline in self._pipelines:
            pipeline.queue.close()

    def is_closed(self) -> bool:
        return any(pipeline.queue.closed for pipeline in self._pipelines)

    def _kill_holder(self, held: LockHeld) -> bool:
        """Kill the process that has held a queue's lock for too long; whether it is one of ours."""
        log.warning("%s", held)
        for process in self.supervisor.processes:
            if process.pid == held.pid:
                process.kill(KillReason(held.what, held.remedy))
                return True
        return False

    def after_update(self, loop: TrainLoop) -> None:
        """Hook: put restarts into the metrics."""
        total = self.supervisor.num_restarts
        if total > self._num_counted:
            loop.metrics.total("faults/actor_restarts", total - self._num_counted)
            self._num_counted = total

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""
