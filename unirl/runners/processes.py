"""The processes runner: each actor is a process, slots and weights lie in shared memory, the
learner trains in this process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from unirl.core.errors import ActorFailed, DeadlineExceeded, LockHeld, QueueClosed, UniRLError
from unirl.core.sample import Batch
from unirl.core.seeding import derive_seed
from unirl.runners.fork_server import interrupts_blocked, process_context
from unirl.runners.loop import Hook, TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.worker import EXIT_USER_ERROR, Lifeline, WorkerJob, actor_main
from unirl.transports.shared import SharedQueue, SharedWeightStore

log = logging.getLogger(__name__)

_END_SECONDS = 5.0
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
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:  # the watcher buries it: nobody is killed twice
            oldest = self._queue.oldest_running()
            if oldest is None or oldest[0] != ticket:
                return True
            time.sleep(0.01)
        return False


class ActorProcesses:
    """The actor processes of one run: started, watched, restarted a bounded number of times, ended.
    Also a hook, for the log.
    """

    def __init__(
        self,
        plan: Plan,
        queue: SharedQueue,
        weights: SharedWeightStore,
        loop: TrainLoop,
        log_dir: Path | None,
    ) -> None:
        self._plan, self._queue, self._weights, self._loop, self._log_dir = (
            plan,
            queue,
            weights,
            loop,
            log_dir,
        )
        self._context = process_context(plan.num_actors)
        self._lifeline = Lifeline()
        self._processes: list[BaseProcess] = []
        self._reports: list[Connection] = []
        self._num_restarts = [0] * plan.num_actors
        self._error: UniRLError | None = None
        self._closing = threading.Event()
        self._idle, self._ended = threading.Event(), threading.Event()
        self._watcher: threading.Thread | None = None
        self._num_counted = 0

    def start(self) -> None:
        """Start all actors and watch them."""
        for index in range(self._plan.num_actors):
            process, report = self._spawn(index)
            self._processes.append(process)
            self._reports.append(report)
        self._watcher = threading.Thread(target=self._watch, name="actor-watcher", daemon=True)
        self._watcher.start()

    def pids(self) -> list[int | None]:
        """Process ids by actor index."""
        return [process.pid for process in self._processes]

    def kill(self, index: int) -> None:
        """Kill one actor; the watcher discards its slot and restarts it."""
        self._processes[index].kill()

    def kill_pid(self, pid: int) -> None:
        """Kill the actor with this process id, if one has it."""
        for process in self._processes:
            if process.pid == pid:
                process.kill()

    def raise_error(self) -> None:
        """Raise what made an actor stop for good, if anything did."""
        if self._error is not None:
            raise self._error

    def after_update(self, loop: TrainLoop) -> None:
        """Hook: put restarts into the metrics."""
        total = sum(self._num_restarts)
        if total > self._num_counted:
            loop.metrics.total("faults/actor_restarts", total - self._num_counted)
            self._num_counted = total

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""

    def close(self) -> None:
        """Close the queue and end every process: first kindly, then not."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._queue.close()
        if self._watcher is not None:
            self._idle.wait(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(_END_SECONDS)
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(_END_SECONDS)
        for report in self._reports:
            report.close()
        self._lifeline.close()

    def _spawn(self, index: int) -> tuple[BaseProcess, Connection]:
        receiver, sender = self._context.Pipe(duplex=False)
        plan = self._plan
        seed = derive_seed(
            plan.run.seed,
            "actor",
            index,
            "version",
            self._loop.learner.version,
            "restart",
            self._num_restarts[index],
        )
        job = WorkerJob(
            make_actor=plan.make_actor,
            queue=self._queue,
            weights=self._weights,
            index=index,
            num_actors=plan.num_actors,
            seed=seed,
            num_threads=plan.runner.actor_threads,
            log_path=self._log_path(index),
            lifeline=self._lifeline,
            report=sender,
            parent_pid=os.getpid(),
            environ=dict(os.environ),
        )
        process = self._context.Process(
            target=actor_main, args=(job,), name=f"unirl-actor-{index:03d}"
        )
        with interrupts_blocked():  # until the child ignores it, Ctrl-C would kill it
            process.start()
        sender.close()
        return process, receiver

    def _watch(self) -> None:
        try:
            self._watch_until_closing()
        finally:
            self._idle.set()
            # The kernel ends an actor together with the thread that started it, and this thread
            # started those that were restarted: it stays until all have ended in good order.
            self._ended.wait(4 * _END_SECONDS)

    def _watch_until_closing(self) -> None:
        while not self._closing.is_set():
            # Only to be prompt: a child that a dead actor left behind may hold its sentinel open.
            wait([process.sentinel for process in self._processes], timeout=0.2)
            for index, process in enumerate(self._processes):
                if self._closing.is_set() or self._queue.closed:
                    return
                if process.is_alive():
                    continue
                try:
                    self._bury(index)
                except UniRLError as error:
                    self._give_up(error)
                    return
                except Exception as error:
                    log.exception("actor %d could not be restarted", index)
                    self._give_up(
                        ActorFailed(
                            f"actor {index} could not be restarted: {error}",
                            "the system must allow another process",
                            "check memory and process limits, then `unirl resume`",
                        )
                    )
                    return

    def _give_up(self, error: UniRLError) -> None:
        self._error = error
        self._queue.close()

    def _bury(self, index: int) -> None:
        """Discard what the dead actor held and start its successor; raises UniRLError when there
        shall be none.
        """
        process, report = self._processes[index], self._read_report(index)
        process.join()
        num_lost = self._queue.reclaim(index)
        what = self._cause_of_death(index, process.exitcode, report)
        log.warning("%s; %d unfinished slot(s) discarded", what, num_lost)
        if process.exitcode == EXIT_USER_ERROR and "parts" in report:
            raise ActorFailed(*report["parts"])
        limit = self._plan.runner.max_restarts
        if self._num_restarts[index] >= limit:
            raise ActorFailed(
                what,
                f"it was restarted {limit} of {limit} times (runner.max_restarts)",
                f"full trace: {self._trace(index)}; mend its cause, then `unirl resume`",
            )
        self._num_restarts[index] += 1
        self._reports[index].close()
        self._processes[index], self._reports[index] = self._spawn(index)

    def _read_report(self, index: int) -> dict[str, list[str]]:
        # A process that the dead actor started may hold the pipe open: no end of file ever comes.
        try:
            if not self._reports[index].poll(1.0):
                return {}
            report: dict[str, list[str]] = json.loads(self._reports[index].recv_bytes())
            return report
        except (EOFError, OSError):
            return {}

    def _cause_of_death(
        self, index: int, exit_code: int | None, report: dict[str, list[str]]
    ) -> str:
        if "type" in report:
            return f"actor {index} died: {report['type']} in {report['where']}: {report['message']}"
        if exit_code is not None and exit_code < 0:
            return f"actor {index} died: killed by signal {-exit_code}"
        return f"actor {index} died: exit code {exit_code}"

    def _log_path(self, index: int) -> Path | None:
        return self._log_dir / f"actor-{index:03d}.txt" if self._log_dir is not None else None

    def _trace(self, index: int) -> str:
        """Where the trace of a dead actor is; one that could not even start wrote none."""
        path = self._log_path(index)
        return str(path) if path is not None and path.exists() else "on standard error, above"
