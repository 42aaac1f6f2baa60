"""Weights from the learner's process to its nodes: once for each node and version, the newest wins.

The learner publishes into a buffer that nobody sends, piece by piece; a thread for each node sends
the newest one, each piece as soon as it is there, and a node that is slow skips versions. On the
node the bytes are received in the place where its processes read them. A node on the learner's own
machine gets no bytes: it maps the buffers, whose descriptors come over a Unix socket, and copies
from there.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from unirl.core.weights import Loadable, Weights
from unirl.device import copy_weights
from unirl.transports.memory import SharedBlock
from unirl.transports.remote.wire import (
    Frame,
    Kind,
    ProtocolError,
    read_exactly,
    read_frame,
    receive_with_fds,
)
from unirl.transports.shared_weights import SharedWeightStore, weights_layout

log = logging.getLogger(__name__)

_PIECE_BYTES, _MOST_PIECES = 2**22, 64
"""Pieces that stay in a processor's cache until they are sent; not so many that their waking takes
longer.
"""
_FRAME_BYTES = 2**24
"""Of one frame at most: the socket's deadline is of each."""
_WAIT_SECONDS = 1.0
_NEAR_SECONDS, _NEAR_BYTES, _RTT_AT = 200e-6, 2**18, 68
"""A way that answers so soon is filled by so little in flight. Where tcp_info has that time."""


@dataclass(eq=False)
class _Buffer:
    block: SharedBlock
    tensors: dict[str, torch.Tensor]
    version: int = -1
    num_readers: int = 0
    num_filled: int = -1
    """Bytes of this version that are there, from the first on; -1: none."""


@dataclass
class RemoteWeights:
    """See WeightStore: the learner's side."""

    example: Weights
    lends: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.shapes = {
            name: (tuple(value.shape), value.dtype) for name, value in self.example.items()
        }
        self._offsets, self.num_bytes = weights_layout(self.example)
        self._pieces = _pieces(self._offsets, self.num_bytes)
        self.example = {}
        self._buffers: list[_Buffer] = []
        self._newest: _Buffer | None = None
        self._filling: _Buffer | None = None
        """What is being published, once its first piece is there."""
        self._changed = threading.Condition()
        self._closed = False

    @property
    def version(self) -> int:
        return -1 if self._newest is None else self._newest.version

    def publish(self, weights: Weights, version: int) -> None:
        """See WeightStore. One thread publishes."""
        buffer = self._free_buffer()
        buffer.version, buffer.num_filled = version, -1
        try:
            for names, end in self._pieces:
                copy_weights({name: buffer.tensors[name] for name in names}, weights)
                self._announce(buffer, end)
        finally:
            with self._changed:
                self._filling = None  # also where it was broken off: nobody waits for the rest
                self._changed.notify_all()

    def _announce(self, buffer: _Buffer, end: int) -> None:
        with self._changed:
            buffer.num_filled = end
            if end == self.num_bytes:
                self._newest = buffer
            else:
                self._filling = buffer
                self._changed.notify_all()

    def _free_buffer(self) -> _Buffer:
        """One that is neither the newest nor being sent: as many as nodes at different versions,
        and one more, at most.
        """
        with self._changed:
            for buffer in self._buffers:
                if buffer is not self._newest and not buffer.num_readers:
                    return buffer
        block = SharedBlock(max(1, self.num_bytes), "unirl-published")
        tensors = {
            name: block.tensor(self._offsets[name], shape, dtype)
            for name, (shape, dtype) in self.shapes.items()
        }
        self._buffers.append(_Buffer(block, tensors))
        return self._buffers[-1]

    def pull(self, into: Loadable, have: int) -> int:
        buffer = self.hold_newer(have, 0.0)
        if buffer is None:
            return have
        try:
            into.load_weights(buffer.tensors)
            return buffer.version
        finally:
            self.let_go(buffer)

    def hold_newer(self, have: int, seconds: float, *, is_whole: bool = True) -> _Buffer | None:
        """The newest version, unless it is `have`: waits for one for so long. It stays as it is
        until `let_go`. is_whole: not one of which `filled` will say when there is more.
        """

        def newest() -> _Buffer | None:
            found = self._newest if is_whole else self._filling or self._newest
            return None if found is None or found.version == have else found

        with self._changed:
            self._changed.wait_for(lambda: self._closed or newest() is not None, seconds)
            found = None if self._closed else newest()
            if found is not None:
                found.num_readers += 1
            return found

    def filled(self, buffer: _Buffer, start: int) -> int | None:
        """How many bytes of it are there: waits for more than `start`. None where no more come."""

        def is_over() -> bool:
            return self._closed or buffer not in (self._filling, self._newest)

        with self._changed:
            while buffer.num_filled <= start:
                if is_over():
                    return None
                self._changed.wait(_WAIT_SECONDS)
            return buffer.num_filled

    def let_go(self, buffer: _Buffer) -> None:
        """It may be written again."""
        with self._changed:
            buffer.num_readers -= 1

    def close(self) -> None:
        """End the threads that send."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed


def _pieces(offsets: Mapping[str, int], num_bytes: int) -> list[tuple[list[str], int]]:
    """Names of weights that are published in one go, and the byte that they end before."""
    least, begun = max(_PIECE_BYTES, num_bytes // _MOST_PIECES), 0
    found: list[tuple[list[str], int]] = []
    names: list[str] = []
    for name, offset in offsets.items():
        if names and offset - begun >= least:
            found.append((names, offset))
            names, begun = [], offset
        names.append(name)
    return [*found, (names, num_bytes)]


def send_versions(sock: socket.socket, number: int, store: RemoteWeights) -> None:
    """Send every version that is the newest when its turn comes, until the store is closed or the
    node is gone; what a thread does.
    """
    have, is_near = -1, sock.family == socket.AF_UNIX
    known: list[_Buffer] = []
    try:
        _keep_in_cache(sock)
        while not store.closed:
            buffer = store.hold_newer(have, _WAIT_SECONDS, is_whole=is_near)
            if buffer is None:
                continue
            try:
                if is_near:
                    _send_shared(sock, number, store, buffer, known)
                    have = buffer.version
                elif _send_bytes(sock, number, store, buffer):
                    have = buffer.version
            finally:
                store.let_go(buffer)
    except OSError as error:
        log.info("a node gets no more weights: %s", error)
    finally:
        sock.close()


def _keep_in_cache(sock: socket.socket) -> None:
    """Let little be in flight where that is enough: the system would let megabytes wait on their
    way, and then each byte would be fetched from memory three times instead of once.
    """
    if sock.family == socket.AF_UNIX or sys.platform != "linux":
        return
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    if int.from_bytes(info[_RTT_AT:], sys.byteorder) < 1e6 * _NEAR_SECONDS:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BYTES)


def _send_bytes(sock: socket.socket, number: int, store: RemoteWeights, buffer: _Buffer) -> bool:
    """Send each piece when it is there; whether all came, and were not broken off."""
    data, start = memoryview(buffer.block.buffer), -1
    while start < store.num_bytes:
        end = store.filled(buffer, start)
        if end is None:
            return False
        start = max(0, start)
        end = min(end, start + _FRAME_BYTES)
        values = (buffer.version, store.num_bytes, start, end - start)
        sock.sendall(Frame(Kind.WEIGHTS, number, 0, values).pack())
        sock.sendall(data[start:end])
        start = end
    return True


def _send_shared(
    sock: socket.socket, number: int, store: RemoteWeights, buffer: _Buffer, known: list[_Buffer]
) -> None:
    """Say where it is, and wait until the node has copied it."""
    fds = [] if buffer in known else [buffer.block.fd]
    known += [buffer] * len(fds)
    values = (buffer.version, store.num_bytes, known.index(buffer))
    socket.send_fds(sock, [Frame(Kind.WEIGHTS, number, 0, values).pack()], fds)
    if read_frame(sock).kind is not Kind.OK:
        raise ProtocolError("a node did not say that it has its weights")


def receive_versions(
    sock: socket.socket, store: SharedWeightStore, seconds: float, on_version: Callable[[], None]
) -> None:
    """Take every version that comes; what a thread of a node does. ConnectionError at the end.

    seconds: how long to wait for more of a piece that has begun to come.
    """
    shared: list[mmap.mmap] = []
    while True:
        frame, fds = _next_frame(sock, store, seconds)
        for fd in fds:
            shared.append(mmap.mmap(fd, max(1, store.num_bytes)))
            os.close(fd)
        if sock.family == socket.AF_UNIX:
            store.receive(partial(_copy, shared[frame.values[2]], frame.values[0]))
            sock.sendall(Frame(Kind.OK).pack())
        else:
            store.receive(partial(_receive_bytes, sock, store, seconds, frame))
        on_version()


def _next_frame(
    sock: socket.socket, store: SharedWeightStore, seconds: float
) -> tuple[Frame, list[int]]:
    sock.settimeout(None)  # the learner may evaluate for an hour; its end is seen at once
    first = bytearray(1)
    if sock.recv_into(first, 1, socket.MSG_PEEK) == 0:
        raise ConnectionResetError("the learner closed the connection")
    sock.settimeout(seconds)
    is_shared = sock.family == socket.AF_UNIX
    frame, fds = receive_with_fds(sock) if is_shared else (read_frame(sock), [])
    if frame.kind is not Kind.WEIGHTS or frame.values[1] != store.num_bytes:
        raise ProtocolError(
            f"{frame.values[1]} bytes of weights came, and these are {store.num_bytes}"
        )
    return frame, fds


def _receive_bytes(
    sock: socket.socket, store: SharedWeightStore, seconds: float, frame: Frame, into: memoryview
) -> int:
    """Fill it piece by piece; the version that it has then. A version that was broken off is
    followed by the beginning of another.
    """
    have, version = 0, frame.values[0]
    while True:
        start, number = frame.values[2:4]
        if start and (start, frame.values[0]) != (have, version):
            raise ProtocolError(f"weights came from byte {start} on, and {have} are there")
        if not 0 <= start <= start + number <= len(into):
            raise ProtocolError(f"{number} bytes of weights came for byte {start} of {len(into)}")
        read_exactly(sock, into[start : start + number])
        have, version = start + number, frame.values[0]
        if have == len(into):
            return version
        frame, _ = _next_frame(sock, store, seconds)


def _copy(source: mmap.mmap, version: int, into: memoryview) -> int:
    """Other threads run meanwhile, as they would not during an assignment to the view."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8, len(into)))
    return version


def node_store(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> SharedWeightStore:
    """The store of a node for weights of these shapes."""
    return SharedWeightStore(
        {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in shapes.items()
        }
    )
