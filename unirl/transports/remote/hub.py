"""Where nodes reach the learner's process: one port, one thread that serves the connections for
slots, and a thread for each node that sends weights.

A node that ended its connection, or was silent for too long, is lost: its leases end at once, and
what comes with them later is refused and counted.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from unirl.transports.remote.io_loop import IoLoop
from unirl.transports.remote.layout import joint_digest
from unirl.transports.remote.node_connection import NodeConnection, Parked
from unirl.transports.remote.outgoing import send_versions
from unirl.transports.remote.relay import SEND_SECONDS, Address, WeightTree
from unirl.transports.remote.server import RemoteServer
from unirl.transports.remote.token import Token
from unirl.transports.remote.weights import RemoteWeights
from unirl.transports.remote.wire import (
    READ_SECONDS,
    Frame,
    Kind,
    ProtocolError,
    Stream,
    no_payload,
    read_frame,
    text_frame,
)

log = logging.getLogger(__name__)

SLOTS, WEIGHTS = 0, 1
"""What a connection is for."""
HELLO_SECONDS = 10.0
_RELAYED_BYTES = 2**23
"""Weights of fewer leave the learner's machine sooner than they would get anywhere by two steps."""


class Hub:
    """host: the address to listen at. silent_seconds: after which a node counts as lost.
    fanout: how many nodes get large weights from here, and from each of them; 0: all, from here.
    on_lost: called by the hub's thread with a node's number and why it was lost.
    """

    def __init__(
        self, host: str = "127.0.0.1", silent_seconds: float = 6.0, fanout: int = 0
    ) -> None:
        self.token, self.silent_seconds = Token(), silent_seconds
        self._trees: defaultdict[int, WeightTree] = defaultdict(lambda: WeightTree(fanout))
        self._fanout = fanout
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._servers: dict[int, weakref.ref[RemoteServer]] = {}
        self.stores: dict[int, RemoteWeights] = {}
        self.nodes: dict[int, NodeConnection] = {}
        self.statuses: dict[int, dict[str, Any]] = {}
        self._strangers: dict[Stream, float] = {}
        self._parked: dict[tuple[int, int], Parked] = {}
        self._closed_queues: set[int] = set()
        self.on_lost: Callable[[int, str], None] = lambda number, why: None
        self.num_refused = 0
        """Connections that were refused: wrong token, other protocol, nothing said."""
        self._threads: list[threading.Thread] = []
        self._relayed: set[socket.socket] = set()
        """Connections to nodes that get their weights from others."""
        self._listeners = [self._listener]
        if sys.platform == "linux":
            self._listeners.append(near := socket.socket(socket.AF_UNIX))
            near.bind(self.token.near_address)
            near.listen(256)
            near.setblocking(False)
        self._loop = IoLoop("remote-hub", self._tick)
        for listener in self._listeners:
            self._loop.watch(listener, partial(self._accept, listener))
        self._loop.start()

    # -- queues ------------------------------------------------------------------------------------

    def add(self, server: RemoteServer) -> None:
        """Serve this queue's members."""
        number, events = server.number, server.memory.pool_events

        def watch() -> None:
            self._servers[number] = weakref.ref(server)
            for pool, event in enumerate(events):

                def serve(pool: int = pool, event: Any = event) -> None:
                    event.clear()
                    self._serve(number, pool)

                self._loop.watch(event, serve)

            def forget() -> None:
                for event in events:
                    self._loop.forget(event)

            weakref.finalize(server, self._loop.call, forget)

        self._loop.ask(watch)

    def server(self, number: int) -> RemoteServer | None:
        """The queue of this number, unless it is gone."""
        found = self._servers.get(number)
        return None if found is None else found()

    def park(self, frame: Frame, pool: int, node: NodeConnection) -> None:
        """Answer this acquire when a slot is free."""
        self._parked.setdefault((frame.queue, pool), deque()).append((frame, node))

    def unpark(self, frame: Frame, node: NodeConnection) -> None:
        """Forget what the channel waits for."""
        for (queue, _), waiting in self._parked.items():
            if queue == frame.queue:
                for each in [
                    one for one in waiting if (one[0].channel, one[1]) == (frame.channel, node)
                ]:
                    waiting.remove(each)

    def redirect(self, queue: int, index: int, taker: NodeConnection) -> None:
        """Nobody else writes to this slot from now on."""
        for node in self.nodes.values():
            if node is not taker and node.receiving == (queue, index):
                node.redirect()

    def _serve(self, queue: int, pool: int) -> None:
        server, waiting = self.server(queue), self._parked.get((queue, pool), deque())
        while waiting:
            frame, node = waiting[0]
            client = node.clients.get(frame.channel)
            if client is not None and not self._guarded(
                node, partial(node.answer_parked, frame, client[1])
            ):
                break
            waiting.popleft()
        for node in [*self.nodes.values()]:
            if node.listening:
                self._guarded(node, partial(node.notify, queue, pool))
        if server is not None and server.closed and queue not in self._closed_queues:
            self._closed_queues.add(queue)
            for node in [*self.nodes.values()]:
                self._guarded(node, partial(node.stream.send, Frame(Kind.CLOSED, queue).pack()))

    # -- connections -------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = listener.accept()
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Not a byte more than the first frame: the next ones are another reader's.
                stream = Stream(sock, no_payload, lambda frame, text: None, reads_ahead=False)
                stream._handle = partial(self._welcome, stream)
                self._strangers[stream] = time.monotonic()
                self._loop.watch(stream, partial(self._read_stranger, stream))

    def _read_stranger(self, stream: Stream) -> None:
        try:
            stream.receive()
        except OSError as error:
            self._refuse(stream, error)

    def _refuse(self, stream: Stream, why: object) -> None:
        log.warning("a connection was refused: %s", why)
        self.num_refused += 1
        self._strangers.pop(stream, None)
        self._loop.forget(stream)
        stream.close()

    def _welcome(self, stream: Stream, frame: Frame, _text: Any) -> None:
        """The first frame of a connection: only who knows the token is answered."""
        if frame.kind is not Kind.HELLO or not self.token.fits(frame.values[:4]):
            raise ProtocolError("it does not know the run's token")
        number, role, digest = frame.values[4:7]
        if role == SLOTS and number >= 0 and digest != self.digest:
            raise ProtocolError("its slots have another layout: another UniRL or another plan")
        del self._strangers[stream]
        self._loop.forget(stream)
        if role == WEIGHTS:
            stream.send(Frame(Kind.WELCOME).pack())
            self._send_weights(stream.detach(), frame)
            return
        before = self.nodes.get(number)
        if before is not None:
            self._lose(before, "it connected once more")
        node = NodeConnection(self, number, stream)
        stream._target, stream._handle, stream.reads_ahead = node.target, node.handle, True
        self.nodes[number] = node
        self._loop.watch(stream, lambda: self._guarded(node, stream.receive))
        self._guarded(node, lambda: stream.send(Frame(Kind.WELCOME).pack()))
        for queue in self._closed_queues:
            self._guarded(node, partial(stream.send, Frame(Kind.CLOSED, queue).pack()))

    @property
    def digest(self) -> int:
        """What all layouts together are known by."""
        servers = [reference() for reference in self._servers.values()]
        return joint_digest(server.memory.layout for server in servers if server is not None)

    def _send_weights(self, sock: socket.socket, hello: Frame) -> None:
        """Have a thread send them, or say first which node has them. hello: values[6] is the port
        at which the node itself passes them on, if it does.
        """
        queue, number, port = hello.queue, hello.values[4], hello.values[6]
        store, where = self.stores.get(queue), None
        if store is None:
            raise ProtocolError(f"weights {queue} are unknown")
        sock.settimeout(SEND_SECONDS)
        is_large = store.num_bytes >= _RELAYED_BYTES
        if 0 < port < 1 << 16 and self._fanout and is_large:
            where = self._trees[queue].join(number, (sock.getpeername()[0], port))

        def send() -> None:
            with contextlib.suppress(OSError):  # it is gone
                if where is not None:
                    self._send_elsewhere(sock, queue, where)
                    self._trees[queue].leave_parent(number)
                send_versions(sock, queue, store.outgoing)
            sock.close()

        thread = threading.Thread(target=send, name="weights", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _send_elsewhere(self, sock: socket.socket, queue: int, where: Address) -> None:
        """Name the node that has weights, and wait until it says that they do not come from it."""
        self._relayed.add(sock)
        try:
            sock.sendall(b"".join(text_frame(Kind.RELAY, where, queue)))
            sock.settimeout(None)
            if read_frame(sock).kind is not Kind.DIRECT:
                raise ProtocolError("it said what it must not say")
            sock.settimeout(SEND_SECONDS)
        finally:
            self._relayed.discard(sock)

    def _guarded(self, node: NodeConnection, work: Callable[[], Any]) -> Any:
        """Work for one node; where its connection fails it is lost."""
        try:
            found = work()
        except OSError as error:
            self._lose(node, str(error))
            return True
        self._loop.set_writing(node.stream, node.stream.wants_to_write)
        return found

    def _lose(self, node: NodeConnection, why: str) -> None:
        if self.nodes.get(node.number) is node:
            del self.nodes[node.number]
        self._loop.forget(node.stream)
        node.stream.close()
        for waiting in self._parked.values():
            for each in [one for one in waiting if one[1] is node]:
                waiting.remove(each)
        if not node.fenced:
            self._end_leases(node, why)

    def _end_leases(self, node: NodeConnection, why: str) -> None:
        for tree in [*self._trees.values()]:
            tree.leave(node.number)
        number = node.revoke_all("actor_died")
        log.info("node %d is lost: %s; %d slot(s) given back", node.number, why, number)
        self.on_lost(node.number, why)

    def _tick(self, late: float) -> None:
        now = time.monotonic()
        for stream, since in [*self._strangers.items()]:
            if now - since > HELLO_SECONDS:
                self._refuse(stream, "it did not say the token in time")
        for node in [*self.nodes.values()]:
            stream = node.stream
            # A learner that was stopped itself has heard of nobody.
            stream.heard_at += late
            self._guarded(node, stream.flush)
            silent = now - stream.heard_at
            if stream.is_within_frame and silent > READ_SECONDS:
                self._lose(node, f"the rest of a frame did not come for {silent:.0f} s")
            elif silent > self.silent_seconds and not node.fenced and node.number >= 0:
                node.fenced = True  # connected still: what comes late is refused, and counted
                self._end_leases(node, f"it was silent for {silent:.1f} s")

    def send_control(self, number: int, content: Any) -> bool:
        """Tell a node to do something; whether it is there."""

        def send() -> bool:
            node = self.nodes.get(number)
            if node is None or node.fenced:
                return False
            self._guarded(node, lambda: node.stream.send(*text_frame(Kind.CONTROL, content)))
            return True

        return bool(self._loop.ask(send))

    def status(self, number: int) -> dict[str, Any]:
        """What a node said of itself last, lost nodes too."""
        return self.statuses.get(number, {})

    def close(self) -> None:
        """End all connections; idempotent."""

        def end() -> None:
            for node in [*self.nodes.values()]:
                self._loop.forget(node.stream)
                node.stream.close()
            for stream in [*self._strangers]:
                stream.close()
            self.nodes.clear()
            for listener in self._listeners:
                self._loop.forget(listener)
                listener.close()

        self._loop.ask(end, 5.0)
        self._loop.close()
        for store in self.stores.values():
            store.close()
        for sock in [*self._relayed]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
