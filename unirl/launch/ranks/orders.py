"""What the first rank sends to the others, and the connections between machines that it goes by.

A connection is of one run alone: who comes says the run's random token first. What follows is read
as tensors and plain values; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from unirl.core.sample import SampleSpec, Slot
from unirl.core.tree import leaves, unflatten
from unirl.storage.checkpoint import Checkpoint
from unirl.transports.remote.token import Token
from unirl.transports.remote.wire import Frame, Kind, ProtocolError, read_first_frame

_HELLO_SECONDS, _CONNECT_SECONDS = 2.0, 20.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""A machine that is gone is known after eleven seconds, though it says nothing."""
_SIOCGIFADDR = 0x8915
NETWORK = "GLOO_SOCKET_IFNAME"
_OF_SLOT = (
    "index", "ticket", "pool", "pool_ticket", "first_version", "last_version", "used",
    "wait_seconds", "work_seconds",
)  # fmt: skip


class OrderPort:
    """Where ranks of other machines come to, on the first one's."""

    def __init__(self, host: str) -> None:
        self.token = Token()
        self._come: dict[int, Connection] = {}
        """By rank, those that nobody has asked for yet: they come in any order."""
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def accept(self, rank: int, seconds: float) -> Connection:
        """The connection of one rank; those that come before it are kept, and all others sent away.
        OSError by a deadline.
        """
        deadline = time.monotonic() + seconds
        while rank not in self._come:
            self._listener.settimeout(max(1e-3, deadline - time.monotonic()))
            sock, _ = self._listener.accept()
            try:
                frame = read_first_frame(sock, _HELLO_SECONDS)
                if frame.kind is Kind.HELLO and self.token.fits(frame.values[:4]):
                    sock.sendall(Frame(Kind.WELCOME).pack())
                    self._come[frame.queue] = _connection(sock)
                    continue
            except (OSError, ProtocolError):
                pass
            sock.close()
        return self._come.pop(rank)

    def forget(self) -> None:
        """Nobody waits for those that came and were not asked for: they are to end."""
        for each in self._come.values():
            each.close()
        self._come.clear()

    def close(self) -> None:
        self.forget()
        self._listener.close()


def connect(address: tuple[str, int], token: bytes, rank: int) -> Connection:
    """To the first rank, as another one."""
    sock = socket.create_connection(address, _CONNECT_SECONDS)
    sock.sendall(Frame(Kind.HELLO, rank, values=Token(token).words).pack())
    if read_first_frame(sock, _CONNECT_SECONDS).kind is not Kind.WELCOME:
        raise ProtocolError("the first rank does not know this one")
    use_network_of(sock.getsockname()[0])
    return _connection(sock)


def _connection(sock: socket.socket) -> Connection:
    sock.settimeout(None)  # deadlines: of what is sent by `limit_sending`, of peers by keep-alive
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(sock.detach())


def use_network_of(address: str) -> bool:
    """Let gloo talk over the network that has this address, unless the user has named one: it would
    take that of the machine's name. Whether a variable was set for that.
    """
    if NETWORK in os.environ:
        return False
    with socket.socket() as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    os.environ[NETWORK] = name
                    return True
    return False


def limit_sending(pipe: Connection, seconds: float) -> None:
    """Let writes to a pipe that nobody reads fail after so many seconds."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as sock:
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_order(pipe: Connection, *order: Any) -> None:
    """A name and values: tensors, numbers, texts and collections of these."""
    buffer = io.BytesIO()
    torch.save(order, buffer)
    pipe.send_bytes(buffer.getbuffer())


def read_order(pipe: Connection) -> list[Any]:
    """The next one; nothing else can be read from it."""
    return [*torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=True)]


def packed(slot: Slot, spec: SampleSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is used of a slot, as values of an order."""
    used: Mapping[str, Any] = spec.used_part(slot.data, slot.used)
    # Cloned: with a view all that it is a part of would be sent.
    data = {"/".join(path): leaf.clone() for path, leaf in leaves(used)}
    return {name: getattr(slot, name) for name in _OF_SLOT}, data


def unpacked(found: tuple[dict[str, Any], dict[str, Any]]) -> Slot:
    """The slot again."""
    notes, data = found
    return Slot(data=unflatten(data), **notes)


def contents(checkpoint: Checkpoint | None) -> tuple[Any, ...]:
    """What a rank needs of a checkpoint whose files it cannot read, as values of an order."""
    if checkpoint is None:
        return ()
    names = ("version", "num_steps", "counters")
    facts = {name: checkpoint.state[name] for name in names}
    return checkpoint.step, checkpoint.model, checkpoint.optimizer, facts


def checkpoint_of(values: Sequence[Any]) -> Checkpoint:
    """The checkpoint again, without samples."""
    step, model, optimizer, facts = values
    return Checkpoint(Path(), step, model, optimizer, None, facts)
