"""The processes runner: each actor is a process, slots and weights are in shared memory, the
learner trains in this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from unirl.core.pool import Pool
from unirl.core.sample import Batch
from unirl.core.transport import Transport
from unirl.errors import ActorFailed, DeadlineExceeded, QueueClosed, UniRLError
from unirl.runners.elastic import elastic_pools
from unirl.runners.loop import Hook
from unirl.runners.pipeline import Pipeline, make_pipelines
from unirl.runners.plan import Plan
from unirl.runners.pool_processes import AllProcesses
from unirl.supervision.pauses import Pauses
from unirl.transports.shared import SharedTransport

_LOOK_SECONDS = 0.5
"""How often the learner, while it waits, looks whether it shall continue to."""


class Members(Hook, Protocol):
    """Those who produce beside the learner's process, on whatever machine."""

    def start(self) -> None: ...
    def close(self) -> None: ...
    def raise_error(self) -> None: ...
    def resize(self, pool: Pool, size: int) -> None: ...
    def actor_pids(self) -> list[int | None]: ...
    def helper_pids(self) -> list[int | None]: ...
    @property
    def num_restarts(self) -> int: ...


MembersT = TypeVar("MembersT", bound=Members)


class TrainingRunner(Generic[MembersT]):
    """Trains in this process, beside those who produce.

    With several learners there is a loop for each, in `loops`; `loop` is the first.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        make_members: Callable[[Plan, Sequence[Pipeline]], MembersT],
    ) -> None:
        self._pipelines = make_pipelines(plan, transport)
        self.loops = [pipeline.loop for pipeline in self._pipelines]
        self.loop = self.loops[0]
        self.processes = make_members(plan, self._pipelines)
        self._elastic = [
            elastic_pools(plan, index, self.processes.resize) for index in range(len(self.loops))
        ]

    def run(self, hooks: Sequence[Hook], *others: Sequence[Hook]) -> None:
        """Train until a hook stops a loop; no actor process is left when it is over.

        others: the hooks of further learners. The first loop to end ends all.
        """
        all_hooks: list[Sequence[Hook]] = [[self.processes, *hooks], *others]
        all_hooks += [()] * (len(self._pipelines) - len(all_hooks))
        all_hooks = [[*own, *hooks] for own, hooks in zip(self._elastic, all_hooks, strict=True)]
        try:
            for pipeline in self._pipelines:
                learner = pipeline.loop.learner
                pipeline.weights.publish(learner.weights(), learner.version)
            self.processes.start()
            if len(self._pipelines) == 1:
                self._train(self._pipelines[0], all_hooks[0])
            else:
                self._train_side_by_side(all_hooks)
        finally:
            self.close()

    def resize(self, pool: Pool, size: int | None) -> None:
        """Let a pool have so many members while the run continues: others join, or some leave when
        they have finished what they hold. None: as many as the learner has use for, between the
        pool's bounds, as before the first call. UniRLError outside of these bounds.
        """
        if size is not None:
            self.processes.resize(pool, size)
        found = [each for own in self._elastic for each in own if each.pool is pool]
        if size is None and not found:
            raise UniRLError(
                f"pool {pool.name!r} cannot find its size by itself",
                f"its plan gives it {pool.count} members, and no fewest and most",
                "say how many, or start the run with a most: --actor.max-actors 8",
            )
        for each in found:
            each.is_pinned = size is not None

    @property
    def num_restarts(self) -> int:
        """How often processes died and were replaced."""
        return self.processes.num_restarts

    def actor_pids(self) -> list[int | None]:
        """Process ids of the actors, pool by pool."""
        return self.processes.actor_pids()

    def helper_pids(self) -> list[int | None]:
        """Process ids of the environment workers and other helpers, pool by pool."""
        return self.processes.helper_pids()

    def restart_actors(self) -> None:
        """Nothing: actors run through a checkpoint; this runner promises no determinism."""

    def close(self) -> None:
        """End all processes; idempotent."""
        self.processes.close()

    def _train_side_by_side(self, hooks: Sequence[Sequence[Hook]]) -> None:
        """Each further loop in a thread of its own, the first in this one."""
        errors: list[BaseException] = []

        def train(pipeline: Pipeline, own: Sequence[Hook]) -> None:
            try:
                self._train(pipeline, own)
            except BaseException as error:
                errors.append(error)
            finally:
                why = pipeline.loop.reason or "with an error"
                for loop in self.loops:
                    loop.stop(f"learner {pipeline.plan.name} ended: {why}")

        threads = [
            threading.Thread(target=train, args=pair, name=pair[0].plan.name, daemon=True)
            for pair in list(zip(self._pipelines, hooks, strict=True))[1:]
        ]
        for thread in threads:
            thread.start()
        train(self._pipelines[0], hooks[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _train(self, pipeline: Pipeline, hooks: Sequence[Hook]) -> None:
        pipeline.loop.run(hooks, take=partial(self._take, pipeline))

    def _take(self, pipeline: Pipeline) -> Batch | None:
        """The next batch, or None when the loop was stopped meanwhile.

        The queue's deadline counts from the last commit or restart; it raises ActorFailed, as the
        learner is sound.
        """
        queue, members = pipeline.queue, self.processes
        started = progress = time.monotonic()
        limit, pauses = pipeline.plan.queue.timeout_seconds, Pauses()
        seen: tuple[int, int] | None = None
        while True:
            try:
                batch = queue.take(pipeline.loop.learner.version, _LOOK_SECONDS)
                # The queue knows of the last look alone.
                batch.wait_seconds = time.monotonic() - started
                return batch
            except QueueClosed:
                members.raise_error()
                raise
            except DeadlineExceeded:
                if pipeline.loop.reason is not None:
                    return None
                pauses.look()
                found = (queue.stats().committed, members.num_restarts)
                if found != seen:
                    seen, progress = found, time.monotonic()
                elif time.monotonic() - progress >= limit + pauses.within(limit):
                    raise ActorFailed(
                        f"the learner waited {time.monotonic() - progress:.0f} s for a slot",
                        queue.describe(),
                        "see the run's logs/, or raise queue.timeout_seconds",
                    ) from None


class ProcessesRunner(TrainingRunner[AllProcesses]):
    """Starts the pools of a plan as processes of this machine, watches over them, and trains."""

    def __init__(self, plan: Plan, *, log_dir: Path | None = None) -> None:
        transport = SharedTransport()
        super().__init__(
            plan, transport, lambda plan, found: AllProcesses(plan, found, transport, log_dir)
        )
