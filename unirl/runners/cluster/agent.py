"""One node of a run: what the processes runner is on one machine, with the queue's table and the
learner elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl.core.pool import Pool
from unirl.errors import QueueClosed, UniRLError, format_error
from unirl.run_events import EventBuffer
from unirl.runners.plan import LearnerPlan, Plan
from unirl.runners.pool_processes import AllProcesses
from unirl.transports.remote.client import NodeQueue
from unirl.transports.remote.layout import NodeMemory
from unirl.transports.remote.link import NodeLink
from unirl.transports.remote.weights import node_store
from unirl.transports.shared import SharedTransport
from unirl.transports.shared_weights import SharedWeightStore

log = logging.getLogger(__name__)

_FIRST_WEIGHTS_SECONDS = 60.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class AgentSetup:
    """What an agent needs to know; picklable, and sent by the cluster's own means."""

    plan: Plan
    number: int
    """Of the agent: none has the number of an earlier one."""
    address: tuple[str, int]
    token: bytes
    members: tuple[tuple[int, ...], ...]
    """By pool, the numbers of the members that run here."""
    shapes: tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], ...]
    """Of the weights, by learner."""
    version: int
    """Of the weights that members begin with."""
    log_dir: Path | None
    earlier: int = 0
    """Agents that had these members before."""


@dataclass(frozen=True)
class NodePipeline:
    """See MemberPipeline."""

    plan: LearnerPlan
    pools: list[Pool]
    queue: NodeQueue
    weights: SharedWeightStore
    version: int


class NodeAgent:
    """Connects a node to the learner's process and runs members there until the queue is closed, or
    the connection ends.
    """

    def __init__(self, setup: AgentSetup) -> None:
        plan = setup.plan
        learners = list(enumerate(plan.learners))
        memories = {i: NodeMemory(each.spec, each.queue, each.reasons) for i, each in learners}
        self._stores = {i: node_store(setup.shapes[i]) for i, _ in learners}
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._processes: AllProcesses | None = None
        self._failure: list[str] | None = None
        root = logging.getLogger("unirl")
        root.setLevel(logging.INFO)
        root.addHandler(events := EventBuffer(self._tell))
        self._events = events
        self._link = NodeLink(
            setup.address,
            setup.token,
            setup.number,
            memories,
            self._stores,
            status=self.status,
            on_control=self._work.put,
        )
        self._pipelines = [
            NodePipeline(
                each, plan.pools_of(each), self._link.queue(i), self._stores[i], setup.version
            )
            for i, each in learners
        ]
        log_dir = setup.log_dir
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError:
                log_dir = None  # the run folder is on another machine
        processes = AllProcesses(
            plan, self._pipelines, SharedTransport(), log_dir, setup.members, setup.earlier
        )
        self._wait_for_weights()
        processes.start()
        self._processes = processes
        self._tell()

    def _wait_for_weights(self) -> None:
        deadline = time.monotonic() + _FIRST_WEIGHTS_SECONDS
        while any(store.version < 0 for store in self._stores.values()):
            if self._link.ended.wait(0.01) or time.monotonic() > deadline:
                raise UniRLError(
                    "a node got no weights",
                    f"{self._link.why or 'none came'} within {_FIRST_WEIGHTS_SECONDS:g} s",
                    "see whether the network is slow, then `unirl resume`",
                )

    def status(self) -> dict[str, Any]:
        """What the learner's process gets with every sign of life."""
        found = self._processes
        if found is None:
            return {}
        return {
            "restarts": found.num_restarts,
            "pids": {
                each.name: each.pid
                for pool in found.pools
                for each in (*pool.actors, *pool.workers)
            },
            "events": self._events.newest(),
            "error": self._failure,
        }

    def _tell(self) -> None:
        """At once: an agent that dies next has said it."""
        if self._processes is not None:
            self._link.tell()

    def run(self) -> None:
        """Until it is over; then nothing that it started is left."""
        processes = self._processes
        assert processes is not None
        try:
            while not self._link.ended.is_set():
                with contextlib.suppress(queue.Empty):
                    self._obey(processes, self._work.get(timeout=_LOOK_SECONDS))
                if processes.is_closed():
                    self._report(processes)
                    break
        finally:
            self._link.close_channels()
            processes.close()
            self._link.close()

    def _report(self, processes: AllProcesses) -> None:
        """Say why members stopped for good, and leave time for it to be heard."""
        try:
            processes.raise_error()
        except UniRLError as error:
            self._failure = list(error.parts)
            self._link.ended.wait(2.0)

    def _obey(self, processes: AllProcesses, order: Any) -> None:
        if "assign" in order:
            pool, numbers = order["assign"]
            with contextlib.suppress(QueueClosed):
                processes.pools[pool].assign(numbers, processes.supervisor)


def run_agent(
    agent: NodeAgent, linger_seconds: float = 0.0, at_end: Callable[[], None] | None = None
) -> None:
    """What the thread of an agent's process does; the process ends with it, if nobody ends it
    before. at_end: called when all is over.
    """
    try:
        agent.run()
    except BaseException as error:
        log.exception("the agent of a node failed: %s", format_error(error))
    finally:
        if at_end is not None:
            at_end()
        time.sleep(linger_seconds)
        os._exit(0)
