"""The transport between machines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from unirl.core.queue import REASONS, QueueClient, QueueConfig
from unirl.core.sample import SampleSpec
from unirl.core.weights import Weights
from unirl.errors import LockHeld
from unirl.transports.events import FdEvent
from unirl.transports.memory import LocalCells
from unirl.transports.remote.hub import Hub
from unirl.transports.remote.layout import NodeMemory
from unirl.transports.remote.link import NodeLink
from unirl.transports.remote.server import RemoteQueueMemory, RemoteServer
from unirl.transports.remote.weights import RemoteWeights


class RemoteTransport:
    """See Transport. host: the address of this machine that nodes connect to. weights_fanout: how
    many nodes get large weights from here, and from each of them; 0: all, from here.

    Queues and weight stores are numbered in the order in which they are made; those of one number
    belong together.
    """

    def __init__(
        self, host: str = "127.0.0.1", silent_seconds: float = 6.0, weights_fanout: int = 0
    ) -> None:
        self.hub = Hub(host, silent_seconds, weights_fanout)
        self._num_queues = 0
        self._link: NodeLink | None = None

    def queue(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        *,
        shares: Sequence[float] = (1.0,),
        reasons: Sequence[str] = REASONS,
    ) -> RemoteServer:
        memory = RemoteQueueMemory(spec, config, shares, reasons)
        server = RemoteServer(memory, self._num_queues, self._join)
        self._num_queues += 1
        self.hub.add(server)
        return server

    def weights(self, example: Weights) -> RemoteWeights:
        store = RemoteWeights(example)
        self.hub.stores[len(self.hub.stores)] = store
        return store

    def cells(self, number: int) -> LocalCells:
        return LocalCells(number)

    def event(self) -> FdEvent:
        return FdEvent()

    def end_lock_holders_by(self, end: Callable[[LockHeld], bool]) -> None:
        """See Transport. The table's lock is of this process alone."""

    def _join(self, server: RemoteServer, pool: int, name: str) -> QueueClient:
        """A member in this process, or one that it starts: a node of its own."""
        if self._link is None:
            token = self.hub.token.data
            self._link = NodeLink(self.hub.address, token, -1, {}, {})
        queue = server.local_node
        if queue is None:
            memory = NodeMemory(server.memory.spec, server.config, server.memory.reasons)
            self._link.add(server.number, memory)
            weakref.finalize(server, self._link.drop, server.number)
            queue = server.local_node = self._link.queue(server.number)
        client = queue.join(pool, name, waits_for_commits=True)
        client.server = server
        return client

    def close(self) -> None:
        """End all connections; idempotent."""
        if self._link is not None:
            self._link.close()
        self.hub.close()
