"""Weights from the learner's process to its nodes: once for each node and version, the newest wins.

The learner publishes into a buffer that nobody sends, piece by piece; a thread for each node sends
the newest one, each piece as soon as it is there, and a node that is slow skips versions. On the
node the bytes are received in the place where its processes read them. A node on the learner's own
machine gets no bytes: it maps the buffers, whose descriptors come over a Unix socket, and copies
from there. Where there are many nodes, most get their weights from other nodes (see `relay`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from unirl.core.weights import Loadable, Weights
from unirl.device import copy_weights
from unirl.transports.memory import SharedBlock
from unirl.transports.remote.outgoing import Buffer, Outgoing
from unirl.transports.remote.wire import (
    READ_SECONDS,
    Frame,
    Kind,
    ProtocolError,
    read_exactly,
    read_frame,
    read_text,
    receive_with_fds,
)
from unirl.transports.shared_weights import SharedWeightStore, weights_layout

log = logging.getLogger(__name__)

_PIECE_BYTES, _MOST_PIECES = 2**22, 64
"""Pieces that stay in a processor's cache until they are sent; not so many that their waking takes
longer.
"""
SILENT_SECONDS = 3.0
"""A node that passes weights on gives signs of life: after so long without one it is left."""


@dataclass
class RemoteWeights:
    """See WeightStore: the learner's side. outgoing: what its nodes get."""

    example: Weights
    lends: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.shapes = {
            name: (tuple(value.shape), value.dtype) for name, value in self.example.items()
        }
        self._offsets, self.num_bytes = weights_layout(self.example)
        self._pieces = _pieces(self._offsets, self.num_bytes)
        self.example = {}
        self._buffers: list[Buffer] = []
        self.outgoing = Outgoing(self.num_bytes)

    @property
    def version(self) -> int:
        newest = self.outgoing.newest
        return -1 if newest is None else newest.version

    def publish(self, weights: Weights, version: int) -> None:
        """See WeightStore. One thread publishes."""
        buffer = self._free_buffer()
        self.outgoing.begin(buffer, version)
        try:
            for names, end in self._pieces:
                copy_weights({name: buffer.tensors[name] for name in names}, weights)
                self.outgoing.announce(buffer, end)
        finally:
            self.outgoing.break_off()

    def _free_buffer(self) -> Buffer:
        """One that is neither the newest nor being sent: as many as nodes at different versions,
        and one more, at most.
        """
        for buffer in self._buffers:
            if not self.outgoing.is_held(buffer):
                return buffer
        block = SharedBlock(max(1, self.num_bytes), "unirl-published")
        tensors = {
            name: block.tensor(self._offsets[name], shape, dtype)
            for name, (shape, dtype) in self.shapes.items()
        }
        data = memoryview(block.buffer)[: self.num_bytes]
        self._buffers.append(Buffer(data, block, tensors))
        return self._buffers[-1]

    def pull(self, into: Loadable, have: int) -> int:
        buffer = self.outgoing.hold_newer(have, 0.0, None)
        if buffer is None:
            return have
        try:
            into.load_weights(buffer.tensors)
            return buffer.version
        finally:
            self.outgoing.let_go(buffer, None)

    def close(self) -> None:
        """End the threads that send."""
        self.outgoing.close()


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


class NodeWeights:
    """A node's side. outgoing: what other nodes get from here, while it comes.

    on_version: called when a version is whole. connect: reaches another node that has them.
    """

    def __init__(
        self,
        store: SharedWeightStore,
        on_version: Callable[[], None],
        connect: Callable[[Any], socket.socket] | None = None,
    ) -> None:
        self._store, self._on_version, self._connect = store, on_version, connect
        self.outgoing = Outgoing(store.num_bytes)
        self._buffers: dict[int, Buffer] = {}

    def receive(self, sock: socket.socket) -> None:
        """Take every version that comes, from other nodes where the learner's process says so; what
        a thread does. ConnectionError at the end.
        """
        while True:
            where = self._receive(sock, READ_SECONDS, None)
            try:
                if self._connect is None:
                    raise ProtocolError("this node takes weights from the learner's process alone")
                with contextlib.closing(self._connect(where)) as other:
                    self._receive(other, SILENT_SECONDS, SILENT_SECONDS)
            except OSError as error:
                text = "weights come from the learner's process now, not from %s: %s"
                log.info(text, where, error)
            sock.sendall(Frame(Kind.DIRECT).pack())

    def _receive(self, sock: socket.socket, seconds: float, idle_seconds: float | None) -> Any:
        """Until it is said where else to take them from. seconds: how long to wait for more of a
        piece that has begun to come; idle_seconds: for the first of it.
        """
        shared: list[mmap.mmap] = []
        reads = _Reads(sock, self._store.num_bytes, seconds, idle_seconds)
        while True:
            frame, fds = reads.next_frame()
            for fd in fds:
                shared.append(mmap.mmap(fd, max(1, self._store.num_bytes)))
                os.close(fd)
            if frame.kind is Kind.RELAY:
                return read_text(sock, frame)
            if sock.family == socket.AF_UNIX:
                self._store.receive(partial(_copy, shared[frame.values[2]], frame.values[0]))
                sock.sendall(Frame(Kind.OK).pack())
            else:
                self._store.receive(partial(self._receive_bytes, reads, frame))
            self._on_version()

    def _receive_bytes(self, reads: _Reads, frame: Frame, index: int, into: memoryview) -> int:
        """Fill it piece by piece; the version that it has then. A version that was broken off is
        followed by the beginning of another.
        """
        buffer = self._buffers.setdefault(index, Buffer(into))
        have, version = 0, frame.values[0]
        try:
            while True:
                start, number = frame.values[2:4]
                if start and (start, frame.values[0]) != (have, version):
                    raise ProtocolError(f"weights came from byte {start} on, and {have} are there")
                if not 0 <= start <= start + number <= len(into):
                    raise ProtocolError(
                        f"{number} bytes of weights came for byte {start} of {len(into)}"
                    )
                version = frame.values[0]
                if not start:
                    self.outgoing.begin(buffer, version)
                for have in _ends(start, start + number):
                    read_exactly(reads.sock, into[start:have])
                    self.outgoing.announce(buffer, have)
                    start = have
                if have == len(into):
                    return version
                frame, _ = reads.next_frame()
        finally:
            self.outgoing.break_off()


def _ends(start: int, end: int) -> list[int]:
    """Where pieces end, the last one at `end`."""
    return [*range(start + _PIECE_BYTES, end, _PIECE_BYTES), end]


@dataclass(frozen=True)
class _Reads:
    """Reads headers of weights that are so many bytes; see NodeWeights._receive."""

    sock: socket.socket
    num_bytes: int
    seconds: float
    idle_seconds: float | None

    def next_frame(self) -> tuple[Frame, list[int]]:
        """Of weights, or of where they are; signs of life are passed over."""
        while True:
            # The learner may evaluate for an hour; its end is seen at once.
            self.sock.settimeout(self.idle_seconds)
            if self.sock.recv_into(bytearray(1), 1, socket.MSG_PEEK) == 0:
                raise ConnectionResetError("the other side closed the connection")
            self.sock.settimeout(self.seconds)
            is_shared = self.sock.family == socket.AF_UNIX
            frame, fds = receive_with_fds(self.sock) if is_shared else (read_frame(self.sock), [])
            if frame.kind is not Kind.PONG:
                break
        if frame.kind is Kind.RELAY and self.idle_seconds is None:
            return frame, fds
        if frame.kind is not Kind.WEIGHTS or frame.values[1] != self.num_bytes:
            raise ProtocolError(
                f"{frame.values[1]} bytes of weights came, and these are {self.num_bytes}"
            )
        return frame, fds


def _copy(source: mmap.mmap, version: int, index: int, into: memoryview) -> int:
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
