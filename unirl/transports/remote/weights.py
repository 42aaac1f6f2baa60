"""Weights from the learner's process to its nodes: once for each node and version, the newest wins.

The learner publishes into a buffer that nobody sends; a thread for each node sends the newest one,
and a node that is slow skips versions. On the node the bytes are received in the place where its
processes read them. A node on the learner's own machine gets no bytes: it maps the buffers, whose
descriptors come over a Unix socket, and copies from there.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
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

_PIECE_BYTES = 2**24


@dataclass(eq=False)
class _Buffer:
    block: SharedBlock
    tensors: dict[str, torch.Tensor]
    version: int = -1
    num_readers: int = 0


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
        self.example = {}
        self._buffers: list[_Buffer] = []
        self._newest: _Buffer | None = None
        self._changed = threading.Condition()
        self._closed = False

    @property
    def version(self) -> int:
        return -1 if self._newest is None else self._newest.version

    def publish(self, weights: Weights, version: int) -> None:
        """See WeightStore. One thread publishes."""
        buffer = self._free_buffer()
        copy_weights(buffer.tensors, weights)
        buffer.version = version
        with self._changed:
            self._newest = buffer
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

    def hold_newer(self, have: int, seconds: float) -> _Buffer | None:
        """The newest version, unless it is `have`: waits for one for so long. It stays as it is
        until `let_go`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.version not in (have, -1), seconds)
            if self._newest is None or self.version == have or self._closed:
                return None
            self._newest.num_readers += 1
            return self._newest

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


def send_versions(sock: socket.socket, number: int, store: RemoteWeights) -> None:
    """Send every version that is the newest when its turn comes, until the store is closed or the
    node is gone; what a thread does.
    """
    have, send = -1, _send_shared if sock.family == socket.AF_UNIX else _send_bytes
    known: list[_Buffer] = []
    try:
        while not store.closed:
            buffer = store.hold_newer(have, 1.0)
            if buffer is None:
                continue
            try:
                send(sock, number, store, buffer, known)
                have = buffer.version
            finally:
                store.let_go(buffer)
    except OSError as error:
        log.info("a node gets no more weights: %s", error)
    finally:
        sock.close()


def _send_bytes(
    sock: socket.socket, number: int, store: RemoteWeights, buffer: _Buffer, known: list[_Buffer]
) -> None:
    sock.sendall(Frame(Kind.WEIGHTS, number, 0, (buffer.version, store.num_bytes)).pack())
    data = memoryview(buffer.block.buffer)[: store.num_bytes]
    for start in range(0, len(data), _PIECE_BYTES):  # the socket's deadline is of each
        sock.sendall(data[start : start + _PIECE_BYTES])


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

    seconds: how long to wait for more of a version that has begun to come.
    """
    shared: list[mmap.mmap] = []
    while True:
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
        if is_shared:
            for fd in fds:
                shared.append(mmap.mmap(fd, max(1, store.num_bytes)))
                os.close(fd)
            store.receive(partial(_copy, shared[frame.values[2]]), frame.values[0])
            sock.sendall(Frame(Kind.OK).pack())
        else:
            store.receive(lambda view: read_exactly(sock, view), frame.values[0])
        on_version()


def _copy(source: mmap.mmap, into: memoryview) -> None:
    """Other threads run meanwhile, as they would not during an assignment to the view."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8, len(into)))


def node_store(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> SharedWeightStore:
    """The store of a node for weights of these shapes."""
    return SharedWeightStore(
        {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in shapes.items()
        }
    )
