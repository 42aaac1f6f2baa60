"""The members of a run on the nodes of a cluster: an agent for each node, placed, watched, started
again there or elsewhere, and given more members or fewer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unirl.core.pool import Pool
from unirl.errors import ActorFailed, RunLost, UniRLError, format_error
from unirl.run_events import event
from unirl.runners.cluster.agent import AgentSetup
from unirl.runners.cluster.heard import Heard
from unirl.runners.cluster.node_history import NodeHistory
from unirl.runners.cluster.placement import Ask, CannotPlace, Node, fits, place, place_again, total
from unirl.runners.cluster.shares import Cluster, Share, asks_of, names_of
from unirl.runners.loop import TrainLoop
from unirl.runners.pipeline import Pipeline
from unirl.runners.plan import Plan
from unirl.runners.pool_processes import check_size
from unirl.supervision.restarts import Restarts
from unirl.transports.remote.transport import RemoteTransport

log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_NODES_SECONDS = 1.0
"""How often it is asked which nodes are about to go."""
_END_SECONDS = 6.0


@dataclass
class ClusterMembers:
    """See Members."""

    plan: Plan
    pipelines: Sequence[Pipeline]
    transport: RemoteTransport
    cluster: Cluster
    log_dir: Path | None
    _shares: list[Share] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._hub, self._num_counted, self._last_agent = self.transport.hub, 0, 0
        self._lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._hub.on_lost = lambda number, why: self._lost.put((number, why))
        self._leaving: list[Share] = []
        """Their members finish what they hold, and lead nobody."""
        ray = self.plan.ray
        window = self.plan.runner.restart_window_seconds
        self._history = NodeHistory(ray.max_node_failures, window, ray.wait_seconds)
        self._next_numbers = [pool.bounds[0] for pool in self.plan.pools]
        """None has the number of an earlier one, which may not have left yet."""
        self._looked_at = 0.0
        self._num_losses = 0
        """Of agents."""
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
                with self._lock:
                    self._place(asks)
                break
            except CannotPlace:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
        self._watcher.start()

    def _place(self, asks: Sequence[Ask]) -> None:
        """Place members: with an agent that their node has, or with a new one. CannotPlace."""
        agents = {share.node: share for share in self._shares if share.handle is not None}
        try:
            placed = place(asks, self._nodes())
        except CannotPlace:
            self._want(asks)
            raise
        for node, own in placed.items():
            if node in agents:
                agents[node].asks += own
            else:
                self._shares.append(share := Share(own, self._new_restarts()))
                self._start(share, node)

    def _want(self, more: Sequence[Ask] = ()) -> None:
        """Tell the cluster what there is no place for, beside what is placed."""
        placed = [ask for share in self._shares for ask in share.asks]
        self.cluster.want([ask.resources for ask in (*placed, *more)])

    def _nodes(self) -> list[Node]:
        """Those that may be used, with what is left: of what an agent holds, too."""
        found = [each for each in self.cluster.nodes() if not self._history.is_left_out(each.id)]
        for node in found:
            agents = [each for each in (*self._shares, *self._leaving) if each.node == node.id]
            node.reserve([each.reserved for each in agents])
            for share in agents:
                if share in self._shares:
                    node.give(share.reserved)
                    node.take(total(share.asks))
        return found

    def _new_restarts(self) -> Restarts:
        runner = self.plan.runner
        return Restarts(runner.max_restarts, runner.restart_window_seconds)

    def _start(self, share: Share, node: str) -> None:
        self._last_agent += 1
        share.node, share.agent = node, self._last_agent
        share.started_at, share.lost_at, share.is_connected = time.monotonic(), 0.0, False
        share.assigned, share.reserved = share.members(len(self.plan.pools)), total(share.asks)
        setup = AgentSetup(
            self.plan,
            share.agent,
            self._hub.address,
            self._hub.token.data,
            share.assigned,
            tuple(store.shapes for _, store in sorted(self._hub.stores.items())),
            self.pipelines[0].version,
            None if self.log_dir is None else self.log_dir.resolve(),
            share.num_agents,
        )
        share.handle = self.cluster.start_agent(node, share.reserved, setup)
        kind, names = "restarted" if share.num_agents else "started", names_of(share.asks)
        share.num_agents += 1
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
        for share in [*self._shares]:
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
            elif not share.is_connected and self._stop_waiting(share):
                continue
            elif share.asks:
                self._tell(share)
            else:
                self._leave(share)
        for share in [*self._leaving]:
            self._tell(share)
            self._see_off(share, share.agent in lost)
        if time.monotonic() - self._looked_at > _NODES_SECONDS:
            self._drain()
            self._looked_at = time.monotonic()

    def _stop_waiting(self, share: Share) -> bool:
        """Give up an agent that should have connected by now; whether it was so."""
        waited = time.monotonic() - share.started_at
        share.is_connected = share.agent in self._hub.nodes
        if share.is_connected:
            self._history.connect(waited)
        elif waited > self.plan.ray.wait_seconds:
            self._lose(share, "its agent did not connect in time")
            return True
        elif waited > self._history.patience(share.node):
            others = [node for node in self._nodes() if not self._history.has_failed(node.id)]
            if fits(share.asks, others):
                why = f"its agent did not connect within {waited:.1f} s, and other nodes have room"
                self._lose(share, why, is_failure=False)
                return True
        return False

    def _tell(self, share: Share) -> None:
        """Tell an agent which members it is to have, if it does not know."""
        wanted = share.members(len(self.plan.pools))
        if wanted == share.assigned or share.agent not in self._hub.nodes:
            return
        for index, numbers in enumerate(wanted):
            self._hub.send_control(share.agent, {"assign": [index, list(numbers)]})
        share.assigned = wanted

    def _lose(self, share: Share, why: str, *, is_failure: bool = True) -> None:
        names, node = names_of(share.asks), share.node[:12]
        about = event("died", agent=share.agent, node=node, member=names, cause=why)
        log.warning("node agent %d with %s was lost: %s", share.agent, names, why, extra=about)
        if share.handle is not None:
            threading.Thread(target=share.handle.kill, daemon=True).start()  # may take seconds
        if self._history.lose(share.node, is_failure=is_failure):
            about = event("left_out", node=node, cause=why)
            log.warning("node %s has failed too often: left out", node, extra=about)
        try:
            if is_failure:
                share.restarts.count(
                    f"node agent {share.agent} with {names} was lost: {why}",
                    f"see the logs of its node, and {self.log_dir or 'its standard error'}",
                )
        except ActorFailed as error:
            raise RunLost(*error.parts) from error
        self._num_losses += 1
        share.lose()
        self._place_again(share)
        if share.lost_at:
            log.warning("%s find no place yet and wait for a node", names_of(share.asks))
            self._want()

    def _place_again(self, share: Share) -> None:
        """On the same node or on others, as soon as there is what it asks for."""
        if not share.asks:
            self._shares.remove(share)
            return
        nodes = self._nodes()
        nodes.sort(key=lambda node: (self._history.lost_at(node.id), -node.cpus))
        try:
            found = place_again(share.asks, nodes, self._history.has_failed)
        except CannotPlace as error:
            waits = time.monotonic() - share.lost_at
            if waits > self.plan.ray.wait_seconds and not any(each.handle for each in self._shares):
                raise RunLost(
                    f"{names_of(share.asks)} of a lost node: {error.parts[0]}", *error.parts[1:]
                ) from None
            return
        for number, (node, own) in enumerate(found.items()):
            if number:
                another = Share(own, self._new_restarts(), num_agents=share.num_agents)
                self._shares.append(another)
                self._start(another, node)
            else:
                share.asks = own
                self._start(share, node)

    def _give_up(self, error: UniRLError) -> None:
        failed = error if isinstance(error, ActorFailed) else ActorFailed(*error.parts)
        self._error = failed
        for pipeline in self.pipelines:
            pipeline.queue.close()

    # -- leave -------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Leave the nodes that are about to go: their members finish what they hold, and continue
        elsewhere.
        """
        going = {node.id: node.name for node in self.cluster.nodes() if node.is_drained}
        for share in [each for each in self._shares if each.node in going]:
            names = names_of(share.asks)
            about = event("drained", agent=share.agent, node=share.node[:12], member=names)
            text = "node %s is being drained: %s finish what they hold, and continue elsewhere"
            log.warning(text, going[share.node], names, extra=about)
            stays = replace(share)
            self._shares[self._shares.index(share)] = stays
            stays.lose()
            share.asks, share.left_at = [], time.monotonic()
            self._leaving.append(share)
            self._place_again(stays)

    def _leave(self, share: Share) -> None:
        self._shares.remove(share)
        share.left_at = time.monotonic()
        self._leaving.append(share)

    def _see_off(self, share: Share, is_lost: bool) -> None:
        """End an agent that has no members any more, or whose members do not come to an end."""
        pids, seconds = self._hub.status(share.agent).get("pids"), self.plan.runner.hang_seconds
        have_left = pids is not None and not any(share.assigned) and not self._actors_of(pids)
        if is_lost or have_left or time.monotonic() - share.left_at > seconds:
            log.info("node agent %d left", share.agent)
            self._leaving.remove(share)
            if share.handle is not None:
                threading.Thread(target=share.handle.kill, daemon=True).start()

    # -- what a runner asks ------------------------------------------------------------------------

    def raise_error(self) -> None:
        """Raise what ended the run, if anything did."""
        if self._error is not None:
            raise self._error

    @property
    def num_restarts(self) -> int:
        """How often members or whole agents were started again."""
        return self._heard.num_restarts + self._num_losses

    def _actors_of(self, pids: Mapping[str, int | None]) -> list[int | None]:
        """Of what an agent said of its processes."""
        names = [pool.name for pool in self.plan.pools]
        return [pid for name, pid in pids.items() if name.rpartition(" ")[0] in names]

    def _said_pids(self) -> list[Mapping[str, int | None]]:
        agents = [share.agent for share in self._shares if share.agent in self._hub.nodes]
        return [self._hub.status(agent).get("pids", {}) for agent in agents]

    def actor_pids(self) -> list[int | None]:
        """As their agents said last; of no use on this machine unless they run on it."""
        return [pid for pids in self._said_pids() for pid in self._actors_of(pids)]

    def helper_pids(self) -> list[int | None]:
        """As actor_pids."""
        actors = {*self.actor_pids()}
        return [pid for pids in self._said_pids() for pid in pids.values() if pid not in actors]

    def resize(self, pool: Pool, size: int) -> None:
        """Let a pool have so many members: on nodes that have what they ask for."""
        check_size(self.plan, pool, size)
        index = self.plan.pools.index(pool)
        with self._lock:
            own = [
                (share, ask) for share in self._shares for ask in share.asks if ask.pool == index
            ]
            # Those without a node leave first.
            own.sort(key=lambda each: (each[0].lost_at > 0.0, each[1].numbers))
            first = self._next_numbers[index]
            new = range(first, first + size - len(own))
            self._place([Ask(index, pool.name, (number,), pool.resources) for number in new])
            self._next_numbers[index] += len(new)
            for share, ask in own[size:]:
                share.asks.remove(ask)
            for share in self._shares:
                self._tell(share)
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
        for share in (*self._shares, *self._leaving):
            if share.handle is not None:
                share.handle.kill()
        self.cluster.close()
        self.transport.close()
