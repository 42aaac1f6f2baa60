"""A node's connection to the learner's process: its members' calls go out, and answers come back.

Slots are sent from the shared memory that members filled; a grant is passed on only when the
weights that the learner had published by then have arrived.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from unirl.errors import UniRLError
from unirl.transports.remote.client import Channel, NodeQueue
from unirl.transports.remote.hub import HELLO_SECONDS, SLOTS, WEIGHTS
from unirl.transports.remote.io_loop import IoLoop
from unirl.transports.remote.layout import NodeMemory, joint_digest
from unirl.transports.remote.relay import RelayPort
from unirl.transports.remote.token import Token
from unirl.transports.remote.weights import SILENT_SECONDS, NodeWeights
from unirl.transports.remote.wire import (
    Frame,
    Kind,
    ProtocolError,
    Stream,
    read_frame,
    text_frame,
)
from unirl.transports.shared_weights import SharedWeightStore

log = logging.getLogger(__name__)

PING_SECONDS = 0.5
FENCED_SECONDS = 1.0
"""How long a node that was lost may still bring what its members had: it is refused and counted."""
HOLD_SECONDS = 30.0
"""How long a grant waits for its weights; then the queue's `take` judges the sample's age."""


class NodeLink:
    """memories, stores: by the number of their queue. status: what the learner's process gets
    with every sign of life. on_control: what to do when the learner's process says so.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        number: int,
        memories: dict[int, NodeMemory],
        stores: dict[int, SharedWeightStore],
        *,
        status: Callable[[], Any] | None = None,
        on_control: Callable[[Any], None] | None = None,
    ) -> None:
        self._memories, self._stores = memories, stores
        self._status, self._on_control = status, on_control
        self.ended = threading.Event()
        """Set when the connection is gone, or the learner's process refuses this node."""
        self.why = ""
        """Why it has ended."""
        self._streams: dict[int, Stream] = {}
        self._held: dict[int, deque[tuple[float, Frame, bytes]]] = {}
        self._last_channel, self._pinged_at, self._fenced_at = 0, 0.0, 0.0
        self._lock = threading.Lock()
        digest = joint_digest(memory.layout for memory in memories.values())
        known = Token(token)
        self._relay: RelayPort | None = None
        self._weights = {
            queue: NodeWeights(
                store, self._on_version, partial(self._reach_node, known, queue, number)
            )
            for queue, store in stores.items()
        }

        def ask_for_weights(queue: int, sock: socket.socket) -> Frame:
            values = (*known.words, number, WEIGHTS, self._relay_port(sock, known))
            return Frame(Kind.HELLO, queue, 0, values)

        self._weight_sockets = [
            self._connect(address, partial(ask_for_weights, queue), known.near_address)
            for queue in stores
        ]
        hello = Frame(Kind.HELLO, 0, 0, (*known.words, number, SLOTS, digest))
        sock = self._connect(address, lambda sock: hello)
        self._up = Stream(sock, self._target, self._down)
        self._loop = IoLoop("node-link", self._tick)
        self._loop.watch(self._up, lambda: self._guarded(self._up.receive))
        self._loop.start()
        for sock, weights in zip([*self._weight_sockets], self._weights.values(), strict=True):
            threading.Thread(
                target=self._receive, args=(sock, weights), name="node-weights", daemon=True
            ).start()

    @staticmethod
    def _connect(
        address: tuple[str, int], hello: Callable[[socket.socket], Frame], near: str = ""
    ) -> socket.socket:
        """near: where to reach it instead, if it is on this machine."""
        try:
            sock = _connect_near(near)
            if sock is None:
                sock = _connect_far(address, HELLO_SECONDS)
            _say_hello(sock, hello(sock))
        except OSError as error:
            raise UniRLError(
                f"the node cannot reach the learner at {address[0]}:{address[1]}: {error}",
                "nodes connect to it, with the run's token",
                "open its ports to the nodes, and use the same UniRL on all of them",
            ) from error
        return sock

    def _relay_port(self, sock: socket.socket, token: Token) -> int:
        """Where other nodes get weights from this one; 0: nowhere, as it is the learner's machine
        that they would come from.
        """
        if sock.family == socket.AF_UNIX:
            return 0
        if self._relay is None:
            sources = {queue: weights.outgoing for queue, weights in self._weights.items()}
            self._relay = RelayPort(sock, token, sources)
        return self._relay.number

    def _reach_node(self, token: Token, queue: int, number: int, where: Any) -> socket.socket:
        """A connection to another node that has weights. OSError."""
        host, port = where
        sock = _connect_far((str(host), int(port)), SILENT_SECONDS)
        self._weight_sockets.append(sock)
        _say_hello(sock, Frame(Kind.HELLO, queue, 0, (*token.words, number, WEIGHTS)))
        return sock

    def queue(self, number: int) -> NodeQueue:
        """The queue as the node's agent sees it."""
        return NodeQueue(self, number, self._memories[number])

    def add(self, number: int, memory: NodeMemory) -> None:
        """One more queue."""
        self._memories[number] = memory

    def drop(self, number: int) -> None:
        """One queue less."""
        self._memories.pop(number, None)

    def open_channel(self, queue: int) -> tuple[int, Channel]:
        """A new pair of sockets: its number, and the end that may be sent to a process."""
        ours, theirs = socket.socketpair()
        with self._lock:
            self._last_channel += 1
            number = self._last_channel
        if self.ended.is_set():
            ours.close()
            return number, Channel(theirs, queue)

        def target(frame: Frame) -> tuple[memoryview, ...]:
            return ()

        def handle(frame: Frame, text: Any) -> None:
            self._guarded(lambda: self._pass_up(frame, text, number))

        stream = Stream(ours, target, handle)

        def watch() -> None:
            self._streams[number] = stream
            self._loop.watch(stream, lambda: self._read(number, stream))

        self._loop.ask(watch)
        return number, Channel(theirs, queue)

    # -- by the link's thread ----------------------------------------------------------------------

    def _read(self, number: int, stream: Stream) -> None:
        try:
            stream.receive()
        except OSError:  # its process has ended
            self._close_channel(number)

    def _close_channel(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        self._held.pop(number, None)
        if stream is not None:
            self._loop.forget(stream)
            stream.close()
            self._guarded(lambda: self._up.send(Frame(Kind.GONE, 0, number).pack()))

    def _pass_up(self, frame: Frame, text: Any, channel: int) -> None:
        frame = frame._replace(channel=channel)
        if frame.kind is Kind.REVOKE:
            # Its process has ended: what it had committed by then comes first.
            for number, stream in [*self._streams.items()]:
                self._read(number, stream)
        if text is not None:
            self._up.send(*text_frame(frame.kind, text, frame.queue, channel))
        elif frame.carries_slot:
            views = self._views(frame, frame.values[4])
            self._up.send(frame.pack(), *views)
        else:
            self._up.send(frame.pack())

    def _views(self, frame: Frame, used: int) -> list[memoryview]:
        """The part of the frame's slot that is used; -1: all."""
        memory = self._memories[frame.queue]
        return memory.layout.views(memory.bytes, frame.values[0], None if used < 0 else used)

    def _target(self, frame: Frame) -> list[memoryview]:
        """Where what was saved of a sample goes, before its new holder knows of the slot."""
        return self._views(frame, frame.saved - 2) if frame.saved else []

    def _down(self, frame: Frame, text: Any) -> None:
        """What came from the learner's process."""
        if frame.kind is Kind.FENCED:
            self._fenced_at = self._fenced_at or time.monotonic()
        elif frame.kind is Kind.CLOSED:
            memory = self._memories.get(frame.queue)
            if memory is not None:
                memory.close()
        elif frame.kind is Kind.CONTROL:
            if self._on_control is not None:
                self._on_control(text)
        elif frame.kind is not Kind.PONG:
            header = frame._replace(channel=0).pack()
            if text is not None:
                header = b"".join(text_frame(frame.kind, text, frame.queue))
            held = self._held.get(frame.channel)
            if held is not None or self._must_wait(frame):
                now = time.monotonic()
                self._held.setdefault(frame.channel, deque()).append((now, frame, header))
                if held is None and not self._must_wait(frame):  # they came meanwhile
                    self._release_held()
            else:
                self._give(frame.channel, header)

    def _must_wait(self, frame: Frame) -> bool:
        store = self._stores.get(frame.queue)
        return frame.kind is Kind.GRANT and store is not None and store.version < frame.values[5]

    def _give(self, channel: int, data: bytes) -> None:
        stream = self._streams.get(channel)
        if stream is None:
            return
        try:
            stream.send(data)
            self._loop.set_writing(stream, stream.wants_to_write)
        except OSError:
            self._close_channel(channel)

    def _release_held(self) -> None:
        for channel, held in [*self._held.items()]:
            while held:
                since, frame, header = held[0]
                if self._must_wait(frame) and time.monotonic() - since < HOLD_SECONDS:
                    break
                held.popleft()
                self._give(channel, header)
            if not held:
                self._held.pop(channel, None)

    def _tick(self, late: float) -> None:
        now = time.monotonic()
        if self._fenced_at and now - self._fenced_at > FENCED_SECONDS:
            self._end("the learner's process counts this node as lost")
        if not self.ended.is_set() and now - self._pinged_at >= PING_SECONDS:
            self._pinged_at = now
            self._guarded(self._ping)
        for stream in [*self._streams.values()]:
            with contextlib.suppress(OSError):
                stream.flush()
        self._release_held()

    def _ping(self) -> None:
        if self._status is not None:
            self._up.send(*text_frame(Kind.STATUS, self._status()))
        self._up.send(Frame(Kind.PING).pack())

    def tell(self) -> None:
        """Have the learner's process hear at once how this node is."""
        self._loop.call(lambda: self._guarded(self._ping))

    def _guarded(self, work: Callable[[], None]) -> None:
        if self.ended.is_set():
            return
        try:
            work()
        except OSError as error:
            self._end(str(error))
            return
        self._loop.set_writing(self._up, self._up.wants_to_write)

    def _end(self, why: str) -> None:
        """The learner's process is out of reach: nothing that members do counts any more."""
        if self.ended.is_set():
            return
        self.why = why
        self.ended.set()
        for memory in self._memories.values():
            memory.close()
        for number in [*self._streams]:
            self._close_channel(number)
        self._loop.forget(self._up)
        self._up.close()

    def _receive(self, sock: socket.socket, weights: NodeWeights) -> None:
        with contextlib.suppress(OSError):
            weights.receive(sock)
        with contextlib.suppress(OSError):  # the process ends
            self._loop.call(lambda: self._end("no more weights come"))

    def _on_version(self) -> None:
        if self._held:  # waking the other thread costs more than looking
            self._loop.call(self._release_held)

    # -- ends --------------------------------------------------------------------------------------

    def close_channels(self) -> None:
        """Let all members know that it is over."""

        def close() -> None:
            for number in [*self._streams]:
                self._close_channel(number)

        self._loop.ask(close)

    def close(self) -> None:
        """End the connection; idempotent."""
        self._loop.ask(lambda: self._end("closed"), 5.0)
        self._loop.close()
        if self._relay is not None:
            self._relay.close()
        for weights in self._weights.values():
            weights.outgoing.close()
        for sock in self._weight_sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _connect_near(name: str) -> socket.socket | None:
    """A connection within this machine, if who listens there is on it."""
    if not name or sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HELLO_SECONDS)
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        return None
    return sock


def _connect_far(address: tuple[str, int], seconds: float) -> socket.socket:
    sock = socket.create_connection(address, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _say_hello(sock: socket.socket, hello: Frame) -> None:
    """Be let in. ConnectionError where one is not."""
    sock.sendall(hello.pack())
    if read_frame(sock).kind is not Kind.WELCOME:
        raise ProtocolError("the other side did not welcome it")
