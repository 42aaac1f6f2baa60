"""The members of a run on the nodes of a cluster: an agent for each node, placed, watched, started
again there or elsewhere.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unirl.core.pool import Pool, Resources
from unirl.errors import ActorFailed, RunLost, UniRLError, format_error
from unirl.run_events import event
from unirl.runners.cluster.agent import AgentSetup
from unirl.runners.cluster.heard import Heard
from unirl.runners.cluster.placement import Ask, CannotPlace, Node, place, total
from unirl.runners.loop import TrainLoop
from unirl.runners.pipeline import Pipeline
from unirl.runners.plan import Plan
from unirl.runners.pool_processes import check_size
from unirl.supervision.restarts import Restarts
from unirl.transports.remote.transport import RemoteTransport

log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_END_SECONDS = 6.0


class Handle(Protocol):
    """An agent that was started."""

    def poll(self) -> Exception | None: ...
    def kill(self) -> None: ...


class Cluster(Protocol):
    """What starts agents."""

    def nodes(self) -> list[Node]: ...
    def check(self) -> None: ...
    def start_agent(self, node: str, wanted: Resources, setup: AgentSetup) -> Handle: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class _Share:
    """What one agent runs, wherever it is."""

    asks: list[Ask]
    restarts: Restarts
    node: str = ""
    agent: int = -1
    handle: Handle | None = None
    started_at: float = 0.0
    lost_at: float = 0.0
    """Since when it has been without a node."""
    num_losses: int = 0
    """Of agents."""


def asks_of(plan: Plan) -> list[Ask]:
    """What is to be placed: each member; those that share helpers together."""
    asks = []
    for index, pool in enumerate(plan.pools):
        size, num_learners = pool.bounds[0], len(plan.learners_of(pool))
        everyone = range(size * num_learners)
        groups: list[tuple[int, ...]] = [(number,) for number in everyone]
        if pool.helpers is not None:
            groups = [tuple(everyone[first::size]) for first in range(size)]
        for group in groups:
            one, times = pool.resources, len(group)
            wanted = Resources(
                one.cpus * times, one.gpus * times, one.memory_gib * times, one.labels
            )
            asks.append(Ask(index, pool.name, group, wanted))
    return asks


@dataclass
class ClusterMembers:
    """See Members."""

    plan: Plan
    pipelines: Sequence[Pipeline]
    transport: RemoteTransport
    cluster: Cluster
    log_dir: Path | None
    _shares: list[_Share] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._hub, self._num_counted, self._last_agent = self.transport.hub, 0, 0
        self._lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._hub.on_lost = lambda number, why: self._lost.put((number, why))
        self._node_failures: Counter[str] = Counter()
        self._error: UniRLError | None = None
        self._heard = Heard()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Of the shares, which the watcher and `resize` change."""
        self._watcher = threading.Thread(target=self._watch, name="cluster", daemon=True)
        for pipeline in self.pipelines:
            pipeline.queue.reissue = pipeline.plan.reissue  # type: ignore[attr-defined]

    # -- start -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Place all members and start them. CannotPlace when no place is found in time."""
        asks, deadline = asks_of(self.plan), time.monotonic() + self.plan.ray.wait_seconds
        while True:
            try:
                placed = place(asks, self.cluster.nodes())
                break
            except CannotPlace:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
        for node, own in placed.items():
            self._shares.append(share := _Share(own, self._new_restarts()))
            self._start(share, node)
        self._watcher.start()

    def _new_restarts(self) -> Restarts:
        runner = self.plan.runner
        return Restarts(runner.max_restarts, runner.restart_window_seconds)

    def _start(self, share: _Share, node: str) -> None:
        self._last_agent += 1
        share.node, share.agent = node, self._last_agent
        share.started_at, share.lost_at = time.monotonic(), 0.0
        members = tuple(
            tuple(number for ask in share.asks if ask.pool == index for number in ask.numbers)
            for index in range(len(self.plan.pools))
        )
        setup = AgentSetup(
            self.plan,
            share.agent,
            self._hub.address,
            self._hub.token.data,
            members,
            tuple(store.shapes for _, store in sorted(self._hub.stores.items())),
            self.pipelines[0].version,
            None if self.log_dir is None else self.log_dir.resolve(),
        )
        wanted = total(share.asks)
        share.handle = self.cluster.start_agent(node, wanted, setup)
        kind, names = "restarted" if share.num_losses else "started", _names(share.asks)
        about = event(kind, agent=share.agent, node=node[:12], member=names)
        log.info("node agent %d starts %s", share.agent, names, extra=about)

    # -- watch -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_SECONDS):
            try:
                self.cluster.check()
                with self._lock:
                    self._look()
            except UniRLError as error:
                self._give_up(error)
                return
            except Exception as error:
                log.exception("the cluster could not be watched")
                self._give_up(
                    RunLost(
                        f"the cluster could not be watched: {format_error(error)}",
                        "its head must be reachable all the time",
                        "see whether it lives, then `unirl resume`",
                    )
                )
                return

    def _look(self) -> None:
        lost: dict[int, str] = {}
        while not self._lost.empty():
            number, why = self._lost.get()
            lost[number] = why
        for share in self._shares:
            if self._closing.is_set():
                return
            status = self._hub.status(share.agent)
            self._heard.take(share.agent, share.node, status)
            if status.get("error"):
                raise ActorFailed(*status["error"])
            if share.lost_at:
                self._place_again(share)
            elif share.agent in lost:
                self._lose(share, lost[share.agent])
            elif share.handle is not None and (error := share.handle.poll()) is not None:
                if isinstance(error, UniRLError):
                    raise error
                self._lose(share, f"its agent did not start: {format_error(error)[:300]}")
            elif (
                time.monotonic() - share.started_at > self.plan.ray.wait_seconds
                and share.agent not in self._hub.nodes
            ):
                self._lose(share, "its agent did not connect in time")

    def _lose(self, share: _Share, why: str) -> None:
        names = _names(share.asks)
        about = event("died", agent=share.agent, node=share.node[:12], member=names, cause=why)
        log.warning("node agent %d with %s was lost: %s", share.agent, names, why, extra=about)
        if share.handle is not None:
            threading.Thread(target=share.handle.kill, daemon=True).start()  # may take seconds
        self._node_failures[share.node] += 1
        if self._node_failures[share.node] == self.plan.ray.max_node_failures:
            about = event("left_out", node=share.node[:12], cause=why)
            log.warning("node %s has failed too often: left out", share.node[:12], extra=about)
        try:
            share.restarts.count(
                f"node agent {share.agent} with {names} was lost: {why}",
                f"see the logs of its node, and {self.log_dir or 'its standard error'}",
            )
        except ActorFailed as error:
            raise RunLost(*error.parts) from error
        share.num_losses += 1
        share.handle, share.lost_at = None, time.monotonic()
        self._place_again(share)

    def _place_again(self, share: _Share) -> None:
        """On the same node or on another, as soon as one has what it asks for."""
        limit = self.plan.ray.max_node_failures
        nodes = [each for each in self.cluster.nodes() if self._node_failures[each.id] < limit]
        wanted = total(share.asks)
        fitting = [
            node
            for node in nodes
            if node.fits(wanted) and all(node.fits(ask.resources) for ask in share.asks)
        ]
        if fitting:
            # Elsewhere first: a node that has just failed may be about to fail again.
            fitting.sort(key=lambda node: (self._node_failures[node.id], -node.cpus))
            self._start(share, fitting[0].id)
        elif time.monotonic() - share.lost_at > self.plan.ray.wait_seconds:
            raise RunLost(
                f"{_names(share.asks)} of a lost node find no place together",
                "; ".join(node.describe() for node in nodes) or "no node is left",
                "start another node, then `unirl resume`",
            )

    def _give_up(self, error: UniRLError) -> None:
        failed = error if isinstance(error, ActorFailed) else ActorFailed(*error.parts)
        self._error = failed
        for pipeline in self.pipelines:
            pipeline.queue.close()

    # -- what a runner asks ------------------------------------------------------------------------

    def raise_error(self) -> None:
        """Raise what ended the run, if anything did."""
        if self._error is not None:
            raise self._error

    @property
    def num_restarts(self) -> int:
        """How often members or whole agents were started again."""
        return self._heard.num_restarts + sum(share.num_losses for share in self._shares)

    def _pids(self, roles: Sequence[str]) -> list[int | None]:
        agents = [share.agent for share in self._shares if share.agent in self._hub.nodes]
        found = [self._hub.status(agent).get("pids", {}) for agent in agents]
        return [
            pid for pids in found for name, pid in pids.items() if name.rpartition(" ")[0] in roles
        ]

    def actor_pids(self) -> list[int | None]:
        """As their agents said last; of no use on this machine unless they run on it."""
        return self._pids([pool.name for pool in self.plan.pools])

    def helper_pids(self) -> list[int | None]:
        """As actor_pids."""
        return self._pids([pool.helpers.role for pool in self.plan.pools if pool.helpers])

    def resize(self, pool: Pool, size: int) -> None:
        """Let a pool have so many members: on the nodes that the run has, spread."""
        check_size(self.plan, pool, size)
        index = self.plan.pools.index(pool)
        with self._lock:
            own = [
                (share, ask) for share in self._shares for ask in share.asks if ask.pool == index
            ]
            own.sort(key=lambda each: each[1].numbers)
            for share, ask in own[size:]:
                share.asks.remove(ask)
            first = 1 + max((ask.numbers[0] for _, ask in own), default=-1)
            for number in range(first, first + size - len(own)):
                share = min(self._shares, key=lambda share: len(share.asks))
                share.asks.append(Ask(index, pool.name, (number,), pool.resources))
            for share in self._shares:
                numbers = [n for ask in share.asks if ask.pool == index for n in ask.numbers]
                self._hub.send_control(share.agent, {"assign": [index, numbers]})
        log.info("pool %s is to have %d members", pool.name, size)

    def after_update(self, loop: TrainLoop) -> None:
        """Hook: put restarts into the metrics."""
        if (number := self.num_restarts) > self._num_counted:
            loop.metrics.total("faults/actor_restarts", number - self._num_counted)
            self._num_counted = number

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""

    def close(self) -> None:
        """End all members and agents; idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for pipeline in self.pipelines:
            pipeline.queue.close()
        deadline = time.monotonic() + _END_SECONDS
        while self._hub.nodes and time.monotonic() < deadline:
            time.sleep(0.02)
        for share in self._shares:
            if share.handle is not None:
                share.handle.kill()
        self.cluster.close()
        self.transport.close()


def _names(asks: Sequence[Any]) -> str:
    """ "actor 0, 2" """
    pools: dict[str, list[int]] = {}
    for ask in asks:
        pools.setdefault(ask.name, []).extend(ask.numbers)
    return "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in pools.items())
