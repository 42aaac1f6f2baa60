"""The processes runner: each actor is a process, slots and weights lie in shared memory, the
learner trains in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from unirl.core.actor import ActorContext
from unirl.core.errors import DeadlineExceeded, LockHeld, QueueClosed
from unirl.core.exchange import WorkerContext
from unirl.core.sample import Batch
from unirl.core.seeding import derive_seed
from unirl.runners.crew import END_SECONDS, Crew, Member
from unirl.runners.loop import Hook, TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.worker import run_actor
from unirl.transports.shared import SharedQueue, SharedWeightStore

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""How often the learner, while it waits, looks whether an actor hangs."""


class ProcessesRunner:
    """Starts the actors of a plan as processes, watches over them, and trains."""

    def __init__(self, plan: Plan, *, log_dir: Path | None = None) -> None:
        self._plan = plan
        self._queue = SharedQueue(
            plan.spec, plan.queue, num_actors=plan.num_actors, reasons=plan.reasons
        )
        learner = plan.make_learner_seeded()
        self._weights = SharedWeightStore(learner.weights())
        self.loop = TrainLoop(plan, self._queue, self._weights, learner)
        self.actors = ActorProcesses(plan, self._queue, self._weights, self.loop, log_dir)

    def run(self, hooks: Sequence[Hook]) -> None:
        """Train until a hook stops the loop; no actor process is left when it is over."""
        try:
            self._weights.publish(self.loop.learner.weights(), self.loop.learner.version)
            self.actors.start()
            self.loop.run([self.actors, *hooks], take=self._take)
        finally:
            self.close()

    def begin_anew(self) -> None:
        """Nothing: actors run on through a checkpoint; this runner promises no determinism."""

    def close(self) -> None:
        """End all actor processes; idempotent."""
        self.actors.close()

    def _take(self) -> Batch | None:
        try:
            return self._take_from_living()
        except QueueClosed:
            self.actors.raise_error()
            raise

    def _take_from_living(self) -> Batch | None:
        """The next batch, or None when the loop was stopped meanwhile.

        An actor that holds its slot for too long is killed. The queue's deadline counts from the
        last commit or burial.
        """
        limits, committed, progress = self._plan, -1, time.monotonic()
        while True:
            try:
                return self._queue.take(self.loop.learner.version, _LOOK_SECONDS)
            except LockHeld as held:
                log.warning("%s", held)
                self.actors.kill_pid(held.pid)
            except DeadlineExceeded:
                if self.loop.reason is not None:
                    return None
                total = self._queue.totals()["committed"]
                if total != committed or self._bury_hung():
                    committed, progress = total, time.monotonic()
                elif time.monotonic() - progress >= limits.queue.timeout_seconds:
                    raise DeadlineExceeded(
                        f"the learner waited {time.monotonic() - progress:.0f} s for a slot",
                        self._queue.waited_for(),
                        "see the run's logs/, or raise queue.timeout_seconds",
                    ) from None

    def _bury_hung(self) -> bool:
        """Kill the actor that has held the oldest slot for too long; whether its slot is free."""
        oldest = self._queue.oldest_running()
        if oldest is None or oldest[2] < self._plan.runner.hang_seconds:
            return False
        ticket, actor, _ = oldest
        log.warning("actor %d hangs, killed: %s", actor, self._queue.waited_for())
        self.actors.kill(actor)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:  # the watcher buries it: nobody is killed twice
            oldest = self._queue.oldest_running()
            if oldest is None or oldest[0] != ticket:
                return True
            time.sleep(0.01)
        return False


class ActorProcesses:
    """The crew of one run: its actors, and the environment workers if it has any. Also a hook, for
    the log.
    """

    def __init__(
        self,
        plan: Plan,
        queue: SharedQueue,
        weights: SharedWeightStore,
        loop: TrainLoop,
        log_dir: Path | None,
    ) -> None:
        self._plan, self._queue, self._weights, self._loop = plan, queue, weights, loop
        helpers = plan.env_workers
        self._exchange = helpers.make_exchange() if helpers is not None else None
        self._actors = [
            Member("actor", i, partial(self._actor_work, i), plan.runner.actor_threads)
            for i in range(plan.num_actors)
        ]
        self._workers = [
            Member("environment worker", i, partial(self._worker_work, i))
            for i in range(helpers.num_workers if helpers is not None else 0)
        ]
        self._late: set[int] = set()
        self._num_counted = 0
        self._crew = Crew(
            [*self._actors, *self._workers],
            max_restarts=plan.runner.max_restarts,
            log_dir=log_dir,
            dependants=self._dependants,
            mourn=self._mourn,
            look=self._look,
            close_all=queue.close,
            is_closed=lambda: queue.closed,
        )

    def start(self) -> None:
        """Start all processes and watch them."""
        self._crew.start()

    def pids(self) -> list[int | None]:
        """Process ids of the actors."""
        return [member.process.pid if member.process else None for member in self._actors]

    def worker_pids(self) -> list[int | None]:
        """Process ids of the environment workers."""
        return [member.process.pid if member.process else None for member in self._workers]

    @property
    def num_restarts(self) -> int:
        """How many processes died and were replaced."""
        return self._crew.num_restarts

    def kill(self, index: int) -> None:
        """Kill one actor; its slots are discarded and it is restarted."""
        self._actors[index].kill()

    def kill_pid(self, pid: int) -> None:
        """Kill the process with this id, if it is one of ours."""
        for member in self._crew.members:
            if member.process is not None and member.process.pid == pid:
                member.kill()

    def raise_error(self) -> None:
        """Raise what made a process stop for good, if anything did."""
        self._crew.raise_error()

    def after_update(self, loop: TrainLoop) -> None:
        """Hook: put restarts into the metrics."""
        total = self._crew.num_restarts
        if total > self._num_counted:
            loop.metrics.total("faults/actor_restarts", total - self._num_counted)
            self._num_counted = total

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""

    def close(self) -> None:
        """Close the queue and end every process: first kindly, then not."""
        self._crew.close()

    def _seed(self, index: int, num_restarts: int) -> int:
        """An actor's seed; the first is what the inline runner would give it."""
        path = ("restart", num_restarts) if num_restarts else ()
        version = self._loop.learner.version
        return derive_seed(self._plan.run.seed, "actor", index, "version", version, *path)

    def _actor_work(self, index: int, num_restarts: int) -> Callable[[], None]:
        plan = self._plan
        context = ActorContext(
            index, plan.num_actors, self._seed(index, num_restarts), self._weights, self._exchange
        )
        return partial(run_actor, plan.make_actor, context, self._queue)

    def _worker_work(self, index: int, num_restarts: int) -> Callable[[], None]:
        assert self._plan.env_workers is not None and self._exchange is not None
        actor = self._exchange.actors_of(index)[0]
        restarts = num_restarts + self._actors[actor].num_restarts
        seed = derive_seed(self._seed(actor, restarts), "worker", index)
        context = WorkerContext(index, seed, self._exchange, [self._queue])
        return partial(self._plan.env_workers.serve, context)

    def _dependants(self, member: Member) -> list[Member]:
        if self._exchange is None or member.role != "actor":
            return []
        return [self._workers[index] for index in self._exchange.workers_of(member.index)]

    def _mourn(self, member: Member, dependants: Sequence[Member]) -> str:
        """Give back what the dead held."""
        if member.role != "actor":
            assert self._exchange is not None
            reason = "timeout" if member.index in self._late else "actor_died"
            self._late.discard(member.index)
            self._exchange.worker_died(member.index, reason)
            for actor in self._exchange.actors_of(member.index):
                self._queue.ring_actor(actor)
            return "its unfinished slots are discarded"
        for other in dependants:
            self._late.discard(other.index)
        if self._exchange is not None:
            self._exchange.actor_died(member.index)
        num_lost = self._queue.reclaim(member.index)
        return f"{num_lost} unfinished slot(s) discarded"

    def _look(self) -> None:
        """Kill what hangs: workers that owe a step, actors that do not move."""
        if self._exchange is None or self._plan.env_workers is None:
            return
        seconds = self._plan.env_workers.step_timeout
        for index in self._exchange.late_workers(seconds):
            if index not in self._late and self._workers[index].alive:
                log.warning("environment worker %d owes a step for %g s: killed", index, seconds)
                self._late.add(index)
                self._workers[index].kill()
        seconds = self._plan.runner.hang_seconds
        for index in self._exchange.late_actors(seconds):
            if self._actors[index].alive:
                log.warning("actor %d has not moved for %g s: killed", index, seconds)
                self._actors[index].kill()
