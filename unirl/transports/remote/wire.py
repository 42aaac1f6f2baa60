"""What travels between the learner's process and a node: frames with a header of fixed length, some
of them followed by bytes whose number both sides know from the sample spec. Nothing is unpickled.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_HEADER = struct.Struct("<HBBI8q")
_MAGIC = 0x5505
"""Changes with every change of the frames: nodes with another UniRL are refused."""
MAX_TEXT = 1 << 16
READ_SECONDS = 20.0
"""How long to wait for more of a frame that has begun to come."""
_AHEAD_BYTES = 1 << 16
"""Read in one go, whatever frames it is made of: a call of the system costs more than copying that
much, above all in a process with a thread that computes and takes the interpreter meanwhile.
"""


class Kind(enum.IntEnum):
    """What a frame says. Those of the first line carry text: its length is the first value."""

    STATUS, ERROR, TEXT, CONTROL, JOIN, RELAY = range(6)
    HELLO, WELCOME, PING, PONG, FENCED, CLOSED = range(10, 16)
    ACQUIRE, CANCEL, GRANT, NONE, NOTIFY = range(20, 25)
    COMMIT, DISCARD, REISSUE, PROGRESS, LEAVE, GONE, OK, SUBMIT, SAVE = range(30, 39)
    RETIRE, REVOKE, MEMBERS, STATS, DESCRIBE = range(40, 45)
    WEIGHTS, DIRECT = 50, 51


COMMITS = (Kind.COMMIT, Kind.SUBMIT)
"""With the bytes of a slot. The second one is answered only where something is wrong."""
_WITH_TEXT = frozenset((Kind.STATUS, Kind.ERROR, Kind.TEXT, Kind.CONTROL, Kind.JOIN, Kind.RELAY))


class Frame(NamedTuple):
    """One header. channel: whose it is, of those behind the same connection."""

    kind: Kind
    queue: int = 0
    channel: int = 0
    values: tuple[int, ...] = ()

    @property
    def carries_slot(self) -> bool:
        """Of those that nodes send: whether the used part of a slot follows, values[4] of it."""
        return self.kind in COMMITS or (self.kind is Kind.SAVE and self.values[2] > 0)

    @property
    def saved(self) -> int:
        """Of a grant: whether what was saved of the sample follows: 2 + how much, or 0."""
        return self.values[6] if self.kind is Kind.GRANT else 0

    def pack(self) -> bytes:
        """The header's bytes."""
        values = (*self.values, *(0,) * (8 - len(self.values)))
        return _HEADER.pack(_MAGIC, self.kind, self.queue, self.channel, *values)


class ProtocolError(ConnectionError):
    """The other side sent what it must not send."""


def unpack(data: bytes | bytearray) -> Frame:
    """The frame of a header's bytes; ProtocolError where they are none."""
    magic, kind, queue, channel, *values = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(f"the other side does not speak protocol {_MAGIC:#x}")
    try:
        return Frame(Kind(kind), queue, channel, tuple(values))
    except ValueError:
        raise ProtocolError(f"frame of unknown kind {kind}") from None


def text_frame(kind: Kind, content: Any, queue: int = 0, channel: int = 0) -> tuple[bytes, bytes]:
    """Header and JSON text, cut off nowhere: what is too long is an error of the sender."""
    text = json.dumps(content).encode()
    if len(text) > MAX_TEXT:
        raise ProtocolError(f"a text of {len(text)} bytes, the most is {MAX_TEXT}")
    return Frame(kind, queue, channel, (len(text),)).pack(), text


Target = Callable[[Frame], Sequence[memoryview]]
"""Where the bytes after a header go; raises ProtocolError where there must not be so many."""
Handle = Callable[[Frame, Any], None]
"""What to do with a frame that came whole, and with its text, if it has one."""


class Stream:
    """Frames over a socket that never blocks. What is sent is not copied: buffers must stay as they
    are until the other side has it. What is sent while frames are handled leaves after the last.
    """

    def __init__(
        self, sock: socket.socket, target: Target, handle: Handle, *, reads_ahead: bool = True
    ) -> None:
        sock.setblocking(False)
        self.sock, self._target, self._handle = sock, target, handle
        self._header = bytearray(_HEADER.size)
        self._ahead = bytearray(_AHEAD_BYTES)
        self._rest = memoryview(b"")
        """What was read and is not looked at yet."""
        self.reads_ahead = reads_ahead
        self._handles = False
        self._into: deque[memoryview] = deque()
        self._frame: Frame | None = None
        self._text: bytearray | None = None
        self._out: deque[memoryview] = deque()
        self.heard_at = time.monotonic()
        self._detached = False
        self._begin()

    def fileno(self) -> int:
        """Of the socket."""
        return self.sock.fileno()

    def _begin(self) -> None:
        self._frame = self._text = None
        self._into.append(memoryview(self._header))

    @property
    def is_within_frame(self) -> bool:
        """Whether some bytes of a frame have come, and not yet the others."""
        return self._frame is not None or len(self._into[0]) < _HEADER.size

    @property
    def wants_to_write(self) -> bool:
        """Whether the socket was too slow for what was sent so far."""
        return bool(self._out)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send now what the socket takes, and the rest by `flush`."""
        self._out.extend(memoryview(part).cast("B") for part in parts if len(part))
        if not self._handles:
            self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes."""
        while self._out:
            try:
                number = self.sock.sendmsg(list(self._out)[:64])
            except (BlockingIOError, InterruptedError):
                return
            while number:
                first = self._out[0]
                if number < len(first):
                    self._out[0] = first[number:]
                    break
                number -= len(first)
                self._out.popleft()

    def detach(self) -> socket.socket:
        """The socket, for a thread that blocks; nothing more is read here."""
        self.flush()
        self._detached = True
        self.sock.setblocking(True)
        return self.sock

    def redirect(self, scratch: bytearray) -> None:
        """Let what is still to come of this frame go nowhere."""
        self._into = deque(pieces(sum(map(len, self._into)), scratch))

    def receive(self) -> None:
        """Read what is there, and handle the frames that are whole, until a frame hands the stream
        to another handler: errors of what follows are that one's. ConnectionError at the end.
        Nothing, while a frame of this stream is being handled.
        """
        if self._handles:
            return
        handle, self._handles = self._handle, True
        try:
            while not self._detached and self._handle is handle and self._read():
                pass
        finally:
            self._handles = False
        self.flush()

    def _read(self) -> bool:
        """Read once, and handle what is whole; whether there may be more."""
        if not self._rest:
            into = self._into[0]
            is_direct = not self.reads_ahead or len(into) >= _AHEAD_BYTES
            try:
                number = self.sock.recv_into(into if is_direct else self._ahead)
            except (BlockingIOError, InterruptedError):
                return False
            if number == 0:
                raise ConnectionResetError("the other side closed the connection")
            self.heard_at = time.monotonic()
            if is_direct:
                self._filled(number)
                return True
            self._rest = memoryview(self._ahead)[:number]
        may_be_more = len(self._rest) == _AHEAD_BYTES
        while self._rest:  # an error leaves what follows for the next time
            into = self._into[0]
            part, self._rest = self._rest[: len(into)], self._rest[len(into) :]
            into[: len(part)] = part
            self._filled(len(part))
        return may_be_more

    def _filled(self, number: int) -> None:
        """So many more bytes of the frame are there."""
        if number < len(self._into[0]):
            self._into[0] = self._into[0][number:]
            return
        self._into.popleft()
        if not self._into:
            self._advance()

    def _advance(self) -> None:
        if self._frame is None:
            frame = self._frame = unpack(self._header)
            if frame.kind in _WITH_TEXT:
                if not 0 <= frame.values[0] <= MAX_TEXT:
                    raise ProtocolError(f"a text of {frame.values[0]} bytes")
                self._text = bytearray(frame.values[0])
                views: Sequence[memoryview] = [memoryview(self._text)]
            else:
                views = self._target(frame)
            self._into.extend(view for view in views if len(view))
            if self._into:
                return
        frame, text = self._frame, self._text
        self._begin()
        try:
            content = None if text is None else json.loads(text or b"null")
        except ValueError:
            raise ProtocolError("a text that is no JSON") from None
        self._handle(frame, content)

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.sock.close()


def no_payload(frame: Frame) -> Sequence[memoryview]:
    """The target of streams on which only texts follow a header."""
    return ()


def pieces(number: int, scratch: bytearray) -> list[memoryview]:
    """Views of scratch memory for so many bytes that nobody wants."""
    view = memoryview(scratch)
    whole, rest = divmod(number, len(scratch))
    return [view] * whole + ([view[:rest]] if rest else [])


def read_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill the view from a socket that blocks; its timeout is the deadline of each piece."""
    while len(view):
        number = sock.recv_into(view)
        if number == 0:
            raise ConnectionResetError("the other side closed the connection")
        view = view[number:]


def read_frame(sock: socket.socket) -> Frame:
    """The next header of a socket that blocks."""
    data = bytearray(_HEADER.size)
    read_exactly(sock, memoryview(data))
    return unpack(data)


def receive_with_fds(sock: socket.socket) -> tuple[Frame, list[int]]:
    """The next header of a Unix socket that blocks, and the descriptors that come with it."""
    data, fds, _, _ = socket.recv_fds(sock, _HEADER.size, 1, socket.MSG_WAITALL)
    if len(data) < _HEADER.size:
        raise ConnectionResetError("the other side closed the connection")
    return unpack(data), fds


def read_first_frame(sock: socket.socket, seconds: float) -> Frame:
    """The first header of somebody who may be a stranger: all of it within so many seconds."""
    data, have, deadline = bytearray(_HEADER.size), 0, time.monotonic() + seconds
    while have < len(data):
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        number = sock.recv_into(memoryview(data)[have:])
        if number == 0 or time.monotonic() > deadline:
            raise ProtocolError("it did not say the token in time")
        have += number
    return unpack(data)


def read_text(sock: socket.socket, frame: Frame) -> Any:
    """What follows a header with text, of a socket that blocks."""
    if not 0 <= frame.values[0] <= MAX_TEXT:
        raise ProtocolError(f"a text of {frame.values[0]} bytes")
    text = bytearray(frame.values[0])
    read_exactly(sock, memoryview(text))
    try:
        return json.loads(text)
    except ValueError:
        raise ProtocolError("a text that is no JSON") from None


def read_with_text(sock: socket.socket) -> tuple[Frame, Any]:
    """The next header of a socket that blocks, and its text, if it has one."""
    frame = read_frame(sock)
    return frame, read_text(sock, frame) if frame.kind in _WITH_TEXT else None
