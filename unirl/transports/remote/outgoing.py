"""Weights on their way to nodes: each piece is sent as soon as it is there, and the newest version
wins. So does the learner's process, which publishes them, and a node that passes them on.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from unirl.transports.memory import SharedBlock
from unirl.transports.remote.wire import Frame, Kind, ProtocolError, read_frame

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Between two signs of life of a side that has nothing to send."""
_FRAME_BYTES = 2**24
"""Of one frame at most: the socket's deadline is of each."""
_HOLD_SECONDS = 1.0
"""How long memory that is needed is left to those who still send from it."""
_NEAR_SECONDS, _NEAR_BYTES, _RTT_AT = 200e-6, 2**18, 68
"""A way that answers so soon is filled by so little in flight. Where tcp_info has that time."""


@dataclass(eq=False)
class Buffer:
    """Memory of one version."""

    data: memoryview
    block: SharedBlock | None = None
    """What nodes on this machine map instead of getting bytes."""
    tensors: dict[str, Any] = field(default_factory=dict)
    version: int = -1
    num_filled: int = -1
    """Bytes of this version that are there, from the first on; -1: none."""
    holders: list[socket.socket | None] = field(default_factory=list)
    """Who reads it: a connection that it is sent on, or None."""


class Outgoing:
    """The versions of which each is sent when it is the newest, as far as it is there."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.num_sent = num_bytes, 0
        """Of one version, and of all that left by TCP."""
        self.newest: Buffer | None = None
        self._filling: Buffer | None = None
        """What is being written, once its first piece is there."""
        self._changed = threading.Condition()
        self._closed = False

    # -- who writes --------------------------------------------------------------------------------

    def begin(self, buffer: Buffer, version: int) -> None:
        """It will be written, and is not the newest: those who still send from it have a second."""
        with self._changed:
            self._forget_filling()
            if not self._changed.wait_for(lambda: not buffer.holders, _HOLD_SECONDS):
                for holder in buffer.holders:
                    if holder is not None:
                        with contextlib.suppress(OSError):
                            holder.shutdown(socket.SHUT_RDWR)
            buffer.version, buffer.num_filled = version, -1

    def announce(self, buffer: Buffer, end: int) -> None:
        """So many of its bytes are there."""
        with self._changed:
            buffer.num_filled = end
            if end == self.num_bytes:
                self.newest, self._filling = buffer, None
            else:
                self._filling = buffer
            self._changed.notify_all()

    def break_off(self) -> None:
        """Nobody need wait for the rest of what was begun."""
        with self._changed:
            self._forget_filling()

    def _forget_filling(self) -> None:
        if self._filling is not None:
            self._filling = None
            self._changed.notify_all()

    # -- who reads ---------------------------------------------------------------------------------

    def is_held(self, buffer: Buffer) -> bool:
        """Whether it must stay as it is."""
        with self._changed:
            return buffer is self.newest or bool(buffer.holders)

    def hold_newer(
        self, have: int, seconds: float, holder: socket.socket | None, *, is_whole: bool = True
    ) -> Buffer | None:
        """The newest version, unless it is `have`: waits for one for so long. It stays as it is
        until `let_go`. is_whole: not one of which `filled` will say when there is more.
        """

        def newest() -> Buffer | None:
            found = self.newest if is_whole else self._filling or self.newest
            return None if found is None or found.version == have else found

        with self._changed:
            self._changed.wait_for(lambda: self._closed or newest() is not None, seconds)
            found = None if self._closed else newest()
            if found is not None:
                found.holders.append(holder)
            return found

    def filled(self, buffer: Buffer, start: int, seconds: float) -> int | None:
        """How many bytes of it are there: waits so long for more than `start`. None where no more
        come.
        """

        def is_over() -> bool:
            return self._closed or buffer not in (self._filling, self.newest)

        with self._changed:
            self._changed.wait_for(lambda: buffer.num_filled > start or is_over(), seconds)
            if buffer.num_filled > start:
                return buffer.num_filled
            return None if is_over() else start

    def let_go(self, buffer: Buffer, holder: socket.socket | None, num_sent: int = 0) -> None:
        """It may be written again, after so many of its bytes were sent."""
        with self._changed:
            self.num_sent += num_sent
            buffer.holders.remove(holder)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads that send."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed


def send_versions(sock: socket.socket, number: int, source: Outgoing) -> None:
    """Send every version that is the newest when its turn comes, until the source is closed or the
    other side is gone; what a thread does.
    """
    have, is_near = -1, sock.family == socket.AF_UNIX
    known: list[Buffer] = []
    try:
        _keep_in_cache(sock)
        while not source.closed:
            buffer = source.hold_newer(have, BEAT_SECONDS, sock, is_whole=is_near)
            if buffer is None:
                _beat(sock)
                continue
            num_sent = 0
            try:
                if is_near:
                    _send_shared(sock, number, buffer, known)
                    have = buffer.version
                else:
                    num_sent = _send_bytes(sock, number, source, buffer)
                    have = buffer.version if num_sent == source.num_bytes else have
            finally:
                source.let_go(buffer, sock, num_sent)
    except OSError as error:
        log.info("a node gets no more weights from here: %s", error)
    finally:
        sock.close()


def _beat(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.sendall(Frame(Kind.PONG).pack())


def _keep_in_cache(sock: socket.socket) -> None:
    """Let little be in flight where that is enough: the system would let megabytes wait on their
    way, and then each byte would be fetched from memory three times instead of once.
    """
    if sock.family == socket.AF_UNIX or sys.platform != "linux":
        return
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    if int.from_bytes(info[_RTT_AT:], sys.byteorder) < 1e6 * _NEAR_SECONDS:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BYTES)


def _send_bytes(sock: socket.socket, number: int, source: Outgoing, buffer: Buffer) -> int:
    """Send each piece when it is there; the bytes sent until all were, or no more came."""
    start = -1
    while start < source.num_bytes:
        end = source.filled(buffer, start, BEAT_SECONDS)
        if end is None:
            break
        if end == start:
            _beat(sock)
            continue
        start = max(0, start)
        end = min(end, start + _FRAME_BYTES)
        values = (buffer.version, source.num_bytes, start, end - start)
        sock.sendall(Frame(Kind.WEIGHTS, number, 0, values).pack())
        sock.sendall(buffer.data[start:end])
        start = end
    return start


def _send_shared(sock: socket.socket, number: int, buffer: Buffer, known: list[Buffer]) -> None:
    """Say where it is, and wait until the node has copied it."""
    assert buffer.block is not None
    fds = [] if buffer in known else [buffer.block.fd]
    known += [buffer] * len(fds)
    values = (buffer.version, len(buffer.data), known.index(buffer))
    socket.send_fds(sock, [Frame(Kind.WEIGHTS, number, 0, values).pack()], fds)
    if read_frame(sock).kind is not Kind.OK:
        raise ProtocolError("a node did not say that it has its weights")
