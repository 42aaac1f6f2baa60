"""The processes runner: each actor is a process, slots and weights lie in shared memory, the
learner trains in this process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from unirl.core.actor import ActorContext
from unirl.core.env_workers import WorkerContext
from unirl.core.sample import Batch
from unirl.core.seeding import derive_seed
from unirl.errors import ActorFailed, DeadlineExceeded, LockHeld, QueueClosed
from unirl.runners.crew import END_SECONDS, Crew, Member, Verdict
from unirl.runners.loop import Hook, TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.worker import run_actor
from unirl.transports.shared import SharedQueue, SharedWeightStore

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""How often the learner, while it waits, looks whether an actor hangs."""


class Lane:
    """One policy of a run: its queue, its weights, its training loop."""

    def __init__(self, plan: Plan, policy: int) -> None:
        self.plan, self.policy = plan, policy
        self.queue = SharedQueue(
            plan.spec, plan.queue, num_actors=plan.num_actors, reasons=plan.reasons
        )
        learner = plan.make_learner_seeded(policy)
        self.weights = SharedWeightStore(learner.weights())
        self.loop = TrainLoop(plan, self.queue, self.weights, learner)


class ProcessesRunner:
    """Starts the actors of a plan as processes, watches over them, and trains.

    With several policies there is a loop for each, in `loops`; `loop` is the first.
    """

    def __init__(self, plan: Plan, *, log_dir: Path | None = None) -> None:
        self._lanes = [Lane(each, i) for i, each in enumerate((plan, *plan.other_policies))]
        self.loops = [lane.loop for lane in self._lanes]
        self.loop = self.loops[0]
        self.actors = ActorProcesses(self._lanes, log_dir)

    def run(self, hooks: Sequence[Hook], *others: Sequence[Hook]) -> None:
        """Train until a hook stops a loop; no actor process is left when it is over.

        others: the hooks of further policies. The first loop to end ends all.
        """
        all_hooks = [[self.actors, *hooks], *others, *[()] * (len(self._lanes) - 1 - len(others))]
        try:
            for lane in self._lanes:
                lane.weights.publish(lane.loop.learner.weights(), lane.loop.learner.version)
            self.actors.start()
            if len(self._lanes) == 1:
                self._train(self._lanes[0], all_hooks[0])
            else:
                self._train_side_by_side(all_hooks)
        finally:
            self.close()

    def restart_actors(self) -> None:
        """Nothing: actors run on through a checkpoint; this runner promises no determinism."""

    def close(self) -> None:
        """End all actor processes; idempotent."""
        self.actors.close()

    def _train_side_by_side(self, hooks: Sequence[Sequence[Hook]]) -> None:
        """Each further loop in a thread of its own, the first in this one."""
        errors: list[BaseException] = []

        def train(lane: Lane, own: Sequence[Hook]) -> None:
            try:
                self._train(lane, own)
            except BaseException as error:
                errors.append(error)
            finally:
                for loop in self.loops:
                    loop.stop(f"policy {lane.policy} ended: {lane.loop.reason or 'with an error'}")

        threads = [
            threading.Thread(target=train, args=pair, name=f"policy-{pair[0].policy}", daemon=True)
            for pair in list(zip(self._lanes, hooks, strict=True))[1:]
        ]
        for thread in threads:
            thread.start()
        train(self._lanes[0], hooks[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _train(self, lane: Lane, hooks: Sequence[Hook]) -> None:
        lane.loop.run(hooks, take=partial(self._take, lane))

    def _take(self, lane: Lane) -> Batch | None:
        try:
            return self._take_from_living(lane)
        except QueueClosed:
            self.actors.raise_error()
            raise

    def _take_from_living(self, lane: Lane) -> Batch | None:
        """The next batch, or None when the loop was stopped meanwhile.

        An actor that holds its slot for too long is killed. The queue's deadline counts from the
        last commit or burial; it raises ActorFailed, as the learner is sound.
        """
        queue, committed, started = lane.queue, -1, time.monotonic()
        progress = started
        while True:
            try:
                batch = queue.take(lane.loop.learner.version, _LOOK_SECONDS)
                # The queue knows of the last look alone.
                batch.wait_seconds = time.monotonic() - started
                return batch
            except DeadlineExceeded:
                if lane.loop.reason is not None:
                    return None
                total = queue.totals()["committed"]
                if total != committed or self._bury_hung(lane):
                    committed, progress = total, time.monotonic()
                elif time.monotonic() - progress >= lane.plan.queue.timeout_seconds:
                    raise ActorFailed(
                        f"the learner waited {time.monotonic() - progress:.0f} s for a slot",
                        queue.waited_for(),
                        "see the run's logs/, or raise queue.timeout_seconds",
                    ) from None

    def _bury_hung(self, lane: Lane) -> bool:
        """Kill the actor that has held the oldest slot for too long; whether its slot is free.

        With environment workers a slot may wait for one of these: they have deadlines of their own.
        """
        oldest = lane.queue.oldest_running()
        hang_seconds = lane.plan.runner.hang_seconds
        if oldest is None or oldest[2] < hang_seconds or self.actors.exchange is not None:
            return False
        ticket, actor, _ = oldest
        log.warning("actor %d hangs, killed: %s", actor, lane.queue.waited_for())
        self.actors.kill(
            actor,
            Verdict(
                f"it held a slot for longer than runner.hang_seconds, {hang_seconds:g} s",
                "raise runner.hang_seconds, or make unrolls shorter",
            ),
        )
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:  # the watcher buries it: nobody is killed twice
            oldest = lane.queue.oldest_running()
            if oldest is None or oldest[0] != ticket:
                return True
            time.sleep(0.01)
        return False


class ActorProcesses:
    """The crew of one run: its actors, and the environment workers if it has any. Also a hook, for
    the log.
    """

    def __init__(self, lanes: Sequence[Lane], log_dir: Path | None) -> None:
        self._lanes, self._plan = lanes, lanes[0].plan
        plan, helpers = self._plan, self._plan.env_workers
        niceness = plan.runner.actor_niceness
        self.exchange = helpers.make_exchange() if helpers is not None else None
        """Where environment workers and actors meet, if there are workers."""
        self._actors = [
            Member("actor", i, partial(self._actor_work, i), plan.runner.actor_threads, niceness)
            for i in range(len(lanes) * plan.num_actors)
        ]
        self._workers = [
            Member("environment worker", i, partial(self._worker_work, i), niceness=niceness)
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
            close_all=self._close_queues,
            is_closed=lambda: any(lane.queue.closed for lane in lanes),
            modules=[
                getattr(factory, "func", factory).__module__
                for factory in (plan.make_actor, *([helpers.serve] if helpers else []))
            ],
            preload=plan.preload,
        )

    def start(self) -> None:
        """Start all processes and watch them."""
        for lane in self._lanes:
            lane.queue.end_holders_by(self._kill_holder)
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

    def kill(self, index: int, verdict: Verdict | None = None) -> None:
        """Kill one actor; its slots are discarded and it is restarted. verdict: why."""
        self._actors[index].kill(verdict)

    def _kill_holder(self, held: LockHeld) -> bool:
        """Kill whoever has held a queue's lock for too long; whether it is one of ours."""
        log.warning("%s", held)
        for member in self._crew.members:
            if member.process is not None and member.process.pid == held.pid:
                member.kill(Verdict(held.what, held.remedy))
                return True
        return False

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

    def _close_queues(self) -> None:
        for lane in self._lanes:
            lane.queue.close()

    def _lane(self, actor: int) -> tuple[Lane, int]:
        """The lane of an actor and its number there: actors are counted through, lane by lane."""
        policy, index = divmod(actor, self._plan.num_actors)
        return self._lanes[policy], index

    def _seed(self, actor: int, num_restarts: int) -> int:
        """An actor's seed; the first is what the inline runner would give it."""
        path = ("restart", num_restarts) if num_restarts else ()
        version = self._lanes[0].loop.learner.version
        return derive_seed(self._plan.run.seed, "actor", actor, "version", version, *path)

    def _actor_work(self, actor: int, num_restarts: int) -> Callable[[], None]:
        lane, index = self._lane(actor)
        context = ActorContext(
            index,
            lane.plan.num_actors,
            self._seed(actor, num_restarts),
            lane.weights,
            self.exchange,
            lane.policy,
        )
        return partial(run_actor, lane.plan.make_actor, context, lane.queue)

    def _worker_work(self, worker: int, num_restarts: int) -> Callable[[], None]:
        assert self._plan.env_workers is not None and self.exchange is not None
        actors = self.exchange.layout.actors_of(worker)
        # It is also started anew with each of its actors.
        restarts = num_restarts + sum(self._actors[actor].num_restarts for actor in actors)
        seed = derive_seed(self._seed(actors[0], restarts), "worker", worker)
        queues = [lane.queue for lane in self._lanes]
        context = WorkerContext(worker, seed, self.exchange, queues)
        return partial(self._plan.env_workers.serve, context)

    def _dependants(self, member: Member) -> list[Member]:
        if self.exchange is None or member.role != "actor":
            return []
        return [self._workers[index] for index in self.exchange.layout.workers_of(member.index)]

    def _mourn(self, member: Member, dependants: Sequence[Member]) -> str:
        """Give back what the dead held."""
        if member.role != "actor":
            assert self.exchange is not None
            reason = "timeout" if member.index in self._late else "actor_died"
            self._late.discard(member.index)
            self.exchange.worker_died(member.index, reason)
            self._ring_actors_of(member.index)
            return "its unfinished slots are discarded"
        for worker in dependants:
            self._late.discard(worker.index)
        if self.exchange is not None:
            self.exchange.actor_died(member.index)
            for worker in dependants:
                self._ring_actors_of(worker.index)
        lane, index = self._lane(member.index)
        num_lost = lane.queue.reclaim(index, reissue=lane.plan.reissue)
        return f"{num_lost} unfinished slot(s) " + (
            "issued again" if lane.plan.reissue else "discarded"
        )

    def _ring_actors_of(self, worker: int) -> None:
        assert self.exchange is not None
        for actor in self.exchange.layout.actors_of(worker):
            lane, index = self._lane(actor)
            lane.queue.ring_actor(index)

    def _look(self) -> None:
        """Kill what hangs: workers that owe a step, actors that do not move."""
        if self.exchange is None or self._plan.env_workers is None:
            return
        seconds = self._plan.env_workers.step_timeout
        for index in self.exchange.late_workers(seconds):
            if index not in self._late and self._workers[index].alive:
                log.warning("environment worker %d owes a step for %g s: killed", index, seconds)
                self._late.add(index)
                self._workers[index].kill(
                    Verdict(
                        f"it owed a step for longer than env.step_timeout, {seconds:g} s",
                        "raise env.step_timeout, or see why the environment hangs",
                    )
                )
        seconds = self._plan.runner.hang_seconds
        for index in self.exchange.late_actors(seconds):
            if self._actors[index].alive:
                log.warning("actor %d has not moved for %g s: killed", index, seconds)
                self._actors[index].kill(
                    Verdict(
                        f"it did not move for longer than runner.hang_seconds, {seconds:g} s",
                        "raise runner.hang_seconds",
                    )
                )
