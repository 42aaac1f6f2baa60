"""Nodes that pass weights on, so that the learner's machine need not send them to each: it names a
node that has them, each piece is sent on as soon as it is there, and a node that is left without
gets them from the learner's process at once.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from unirl.transports.remote.outgoing import Outgoing, send_versions
from unirl.transports.remote.token import Token
from unirl.transports.remote.wire import Frame, Kind, ProtocolError, read_first_frame

log = logging.getLogger(__name__)

SEND_SECONDS = 60.0
"""For a frame of weights to leave."""
_HELLO_SECONDS = 1.0
"""For all of the first frame: who is next waits for it."""

Address = tuple[str, int]


@dataclass
class _Node:
    address: Address
    parent: int | None
    """The node that it gets its weights from; None: the learner's process."""
    takes_more: bool = True
    """False: somebody could not get them from it."""


class WeightTree:
    """Who gets weights from whom: the learner's process sends them to `fanout` nodes, and each node
    to as many others. The earliest with room takes the next one.
    """

    def __init__(self, fanout: int) -> None:
        self._fanout, self._nodes = fanout, dict[int, _Node]()
        self._lock = threading.Lock()

    def join(self, number: int, address: Address) -> Address | None:
        """Where a new node gets its weights; None: from the learner's process."""
        with self._lock:
            parents = [node.parent for node in self._nodes.values()]
            parent = None
            if parents.count(None) >= self._fanout:
                with_room = (
                    each
                    for each, node in self._nodes.items()
                    if node.takes_more and parents.count(each) < self._fanout
                )
                parent = next(with_room, None)
            self._nodes[number] = _Node(address, parent)
            return None if parent is None else self._nodes[parent].address

    def leave_parent(self, number: int) -> None:
        """A node could not get them where it was sent to: the learner's process sends them."""
        with self._lock:
            if (node := self._nodes.get(number)) is not None and node.parent is not None:
                if (parent := self._nodes.get(node.parent)) is not None:
                    parent.takes_more = False
                node.parent = None

    def leave(self, number: int) -> None:
        """It is gone. Those that had them from it will say so."""
        with self._lock:
            self._nodes.pop(number, None)


class RelayPort:
    """Where other nodes of the run get what this one has of its weights: a port of the address at
    which the learner's process sees it. sources: by the number of their queue.
    """

    def __init__(self, reached: socket.socket, token: Token, sources: Mapping[int, Outgoing]):
        self._token, self._sources = token, sources
        self._listener = socket.create_server((reached.getsockname()[0], 0), family=reached.family)
        self.number: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            try:
                self._welcome(sock)
            except OSError as error:
                log.warning("a connection for weights was refused: %s", error)
                sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        """One after the other: who says nothing costs others a second, and no more."""
        frame = read_first_frame(sock, _HELLO_SECONDS)
        if frame.kind is not Kind.HELLO or not self._token.fits(frame.values[:4]):
            raise ProtocolError("it does not know the run's token")
        source = self._sources.get(frame.queue)
        if source is None:
            raise ProtocolError(f"weights {frame.queue} are unknown")
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(Frame(Kind.WELCOME).pack())
        threading.Thread(
            target=send_versions, args=(sock, frame.queue, source), name="relay", daemon=True
        ).start()

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._listener.close()
