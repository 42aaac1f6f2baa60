"""A cluster on a virtual clock: the real queue server, lent to as many members as are asked for.

Nothing of the queue is modelled. A `TableServer` answers every lease, commit, take and release, and
only what waits is replaced: its lock and its learner's event are of the virtual clock, so that the
learner's `take` blocks while the simulated world continues. What takes time is one of a few
stations that serve one after the other, each with a cost that was measured:

    member produces -> its node's connection -> network -> receiving thread -> commit
    learner takes, learns, publishes -> network -> each node, newest version wins -> release

Equal shapes, costs and seeds give equal results, bit for bit.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from unirl.bench.cluster_shape import ClusterShape
from unirl.bench.server_costs import ServerCosts
from unirl.core.queue import REASONS, QueueClient, QueueStats
from unirl.core.sample import Field, SampleSpec, Slot
from unirl.errors import LeaseExpired
from unirl.transports.events import FdEvent
from unirl.transports.local import LocalQueueMemory
from unirl.transports.slot_table import FREE
from unirl.transports.table_server import TableServer

_SPEC = SampleSpec({"nothing": Field((1,), torch.float32, batch_axis=0)})


@dataclass
class Station:
    """Serves one after the other, `width` at once."""

    width: int = 1
    busy_seconds: float = 0.0
    _free_at: list[float] = field(default_factory=list)

    def serve(self, now: float, seconds: float) -> float:
        """When what comes now is done."""
        free = heapq.heappop(self._free_at) if len(self._free_at) == self.width else now
        end = max(now, free) + seconds
        heapq.heappush(self._free_at, end)
        self.busy_seconds += seconds
        return end


@dataclass(frozen=True)
class Simulated:
    """What came out, counted over `seconds` of virtual time after the warm-up."""

    seconds: float
    slots_per_second: float
    possible_slots_per_second: float
    """What the actors would produce if nothing ever held them up."""
    shares: Mapping[str, float]
    """How busy each station was."""
    staleness_mean: float
    staleness_max: int
    weights_wait_seconds: float
    """How long a lease waits on its node for weights as new as it is, on average."""
    num_slots: int
    """The queue's capacity."""
    stats: QueueStats
    """Of the real server, at the end and since its start."""

    @property
    def limit(self) -> str:
        """What the rate is limited by."""
        name = max(self.shares, key=self.shares.__getitem__)
        return name if self.shares[name] > 0.8 else "actors"


class _Clock:
    """Events in the order of their virtual times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.is_inside = False
        """Whether an event is being handled: it has paid for its calls before."""

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def run_until(self, when: float) -> None:
        """Let everything happen that does until then."""
        while self._events and self._events[0][0] <= when:
            self.step()
        self.now = max(self.now, when)

    def step(self) -> None:
        if not self._events:
            raise RuntimeError("the simulated learner waits, and nothing will ever happen again")
        self.now, _, act = heapq.heappop(self._events)
        self.is_inside = True
        try:
            act()
        finally:
            self.is_inside = False


class _VirtualLock(AbstractContextManager[object]):
    """The queue's lock: the learner's thread gets it when the calls before it are done."""

    def __init__(self, clock: _Clock, station: Station) -> None:
        self._clock, self._station, self.seconds = clock, station, 0.0

    def __enter__(self) -> object:
        if not self._clock.is_inside and self.seconds:
            self._clock.run_until(self._station.serve(self._clock.now, self.seconds))
        return self

    def __exit__(self, *error: object) -> None:
        """Held for no virtual time of its own."""


class _VirtualEvent(FdEvent):
    """The learner's event: what waits for it lets the world continue until it is set."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock, self._is_set = clock, False

    def set(self) -> None:
        self._is_set = True

    def wait(self, seconds: float) -> None:
        while not self._is_set:
            self._clock.step()
        self._is_set = False


class _PoolEvent(FdEvent):
    """The event of members that wait for a slot: what it wakes asks again, a moment later."""

    def __init__(self, clock: _Clock, wake: Callable[[], None]) -> None:
        super().__init__()
        self._clock, self._wake, self._is_set = clock, wake, False

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._clock.at(self._clock.now, self._notify)

    def _notify(self) -> None:
        self._is_set = False
        self._wake()


@dataclass
class _Node:
    client: QueueClient
    version: int = 0
    link: Station = field(default_factory=Station)
    sending: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)
    """Leases that wait for weights."""
    life: int = 0
    """How often it was replaced: what earlier ones finish comes too late."""


class Simulation:
    """See the module. `run` once."""

    def __init__(self, shape: ClusterShape, costs: ServerCosts) -> None:
        self.shape, self.config = shape, shape.queue
        num_slots = self.config.num_slots
        self._lease, self._commit, self._take, self._slot, self._release = (
            cost.seconds(num_slots)
            for cost in (costs.lease, costs.commit, costs.take, costs.slot, costs.release)
        )
        self._random = random.Random(shape.seed)
        self._clock = _Clock()
        self.stations = {
            "queue server": Station(),
            "receiving threads": Station(shape.receive_cores),
            "network in": Station(),
            "network out": Station(),
            "learner": Station(),
        }
        self._lock = _VirtualLock(self._clock, self.stations["queue server"])
        memory = LocalQueueMemory(_SPEC, self.config, (1.0,), REASONS)
        # All that is not the queue's own, and not real, is here.
        memory.lock = self._lock  # type: ignore[assignment]
        memory.learner_event = _VirtualEvent(self._clock)
        memory.pool_events = [_PoolEvent(self._clock, self._wake)]
        self.server = TableServer(memory)
        self._nodes = [_Node(self.server.join(name=f"node {i}")) for i in range(shape.num_nodes)]
        self._waiting: deque[tuple[int, int]] = deque()
        self._version = 0
        self._ages: list[int] = []
        self._waits: list[float] = []

    def run(self) -> Simulated:
        """Warm up, then count."""
        shape, clock = self.shape, self._clock
        for member in range(shape.members):
            # Not all at once: their first unrolls began at any time before.
            clock.at(self._random.random() * shape.unroll_seconds, partial(self._ask, member, 0))
        num_warm = shape.warm_updates or math.ceil(shape.updates / 3)
        for _ in range(num_warm):
            self._update()
        started, learned = clock.now, self.server.stats().learned
        before = {name: one.busy_seconds for name, one in self.stations.items()}
        self._ages.clear()
        self._waits.clear()
        for update in range(shape.updates):
            for _ in range(_due(update, shape.updates, shape.silent_nodes)):
                self._replace(self._random.randrange(len(self._nodes)))
            self._update()
        seconds = clock.now - started
        stats = self.server.stats()
        return Simulated(
            seconds=seconds,
            slots_per_second=(stats.learned - learned) / seconds,
            possible_slots_per_second=shape.members / shape.unroll_seconds,
            shares={
                name: min(1.0, (one.busy_seconds - before[name]) / seconds / one.width)
                for name, one in self.stations.items()
            },
            staleness_mean=sum(self._ages) / len(self._ages),
            staleness_max=max(self._ages),
            weights_wait_seconds=sum(self._waits) / max(1, len(self._waits)),
            num_slots=self.config.num_slots,
            stats=stats,
        )

    # -- the learner -------------------------------------------------------------------------------

    def _update(self) -> None:
        """One turn of the training loop."""
        shape, clock = self.shape, self._clock
        self._lock.seconds = self._take  # every look of `take` locks once
        batch = self.server.take(self._version)
        self._lock.seconds = 0.0
        found = self._slot * len(batch.slots)
        clock.run_until(self.stations["queue server"].serve(clock.now, found))
        self._ages += batch.staleness
        work = shape.learner_seconds + shape.learner_ms_per_slot / 1e3 * len(batch.slots)
        clock.run_until(self.stations["learner"].serve(clock.now, work))
        self._version += 1
        for node in self._nodes:
            self._send_weights(node)
        self._lock.seconds = self._release * len(batch.slots)
        self.server.release(batch)
        self._lock.seconds = 0.0

    def _send_weights(self, node: _Node) -> None:
        """One version at a time: a slow node leaves out those that came meanwhile."""
        if node.sending or node.version == self._version:
            return
        node.sending = True
        seconds = self.shape.weights_mb * 8e-3 / self.shape.network_gbit
        end = self.stations["network out"].serve(self._clock.now, seconds)
        self._clock.at(end, partial(self._got_weights, node, self._version))

    def _got_weights(self, node: _Node, version: int) -> None:
        node.version, node.sending = version, False
        self._send_weights(node)
        held, node.held = node.held, []
        for begin in held:
            begin()

    # -- actors ------------------------------------------------------------------------------------

    def _node(self, member: int) -> _Node:
        return self._nodes[member // self.shape.members_per_node]

    def _ask(self, member: int, life: int) -> None:
        """The agent asks the server for a slot for one of its actors."""
        if self._node(member).life == life:
            end = self.stations["queue server"].serve(self._clock.now, self._lease)
            self._clock.at(end, partial(self._lend, member, life))

    def _lend(self, member: int, life: int) -> None:
        node = self._node(member)
        if node.life != life:
            return
        slot = node.client.try_acquire()
        if slot is None:
            self._waiting.append((member, life))
            return
        now = self._clock.now
        begin = partial(self._begin, member, life, slot, self._version, now)
        self._clock.at(now + self.shape.lease_seconds, begin)

    def _begin(self, member: int, life: int, slot: Slot, version: int, lent_at: float) -> None:
        """A lease is passed on when the node has weights as new as the learner's at its lending."""
        node = self._node(member)
        if node.life != life:
            return
        if node.version < version:
            node.held.append(partial(self._begin, member, life, slot, version, lent_at))
            return
        self._waits.append(self._clock.now - lent_at - self.shape.lease_seconds)
        slot.first_version = slot.last_version = node.version
        mean, spread = self.shape.unroll_seconds, self.shape.unroll_spread
        shape = 1 / spread**2 if spread else 0.0
        seconds = self._random.gammavariate(shape, mean / shape) if shape else mean
        finish = partial(self._finish, member, life, node.client, slot)
        self._clock.at(self._clock.now + seconds, finish)

    def _finish(self, member: int, life: int, client: QueueClient, slot: Slot) -> None:
        node, shape = self._node(member), self.shape
        end = node.link.serve(self._clock.now, shape.slot_kb / shape.connection_kb_per_ms / 1e3)
        self._clock.at(end, partial(self._arrive, client, slot))
        self._ask(member, life)  # the actor does not wait for its bytes to arrive

    def _arrive(self, client: QueueClient, slot: Slot) -> None:
        """In the learner's process: through its network, its receiving threads and its lock. What
        comes from a node that was thought dead arrives all the same.
        """
        shape, now = self.shape, self._clock.now
        now = self.stations["network in"].serve(now, shape.slot_kb * 8e-6 / shape.network_gbit)
        work = shape.receive_ms_per_mb / 1e3 * shape.slot_kb / 1e3
        now = self.stations["receiving threads"].serve(now, work)
        now = self.stations["queue server"].serve(now, self._commit)
        self._clock.at(now, partial(self._try_commit, client, slot))

    def _try_commit(self, client: QueueClient, slot: Slot) -> None:
        with suppress(LeaseExpired):  # which the server counts as late
            client.commit(slot)

    def _wake(self) -> None:
        """As many of the actors that wait as slots are free ask again."""
        num_free = self.server._table.states.tolist().count(FREE)
        while num_free and self._waiting:
            member, life = self._waiting.popleft()
            if self._node(member).life == life:
                self._ask(member, life)
                num_free -= 1

    def _replace(self, index: int) -> None:
        """A node is silent: its leases end, and others take its place. It finishes what it does."""
        node = self._nodes[index]
        self.server.revoke(node.client.member)
        first = index * self.shape.members_per_node
        node.client, node.life = self.server.join(name=f"node {index}"), node.life + 1
        for member in range(first, min(first + self.shape.members_per_node, self.shape.members)):
            self._ask(member, node.life)


def _due(update: int, num_updates: int, number: int) -> int:
    """How many of so many things, spread over all updates, are due at this one."""
    return (update + 1) * number // num_updates - update * number // num_updates
