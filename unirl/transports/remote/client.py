"""What a process of a node sees of the queue: a socket to its node's link, which passes every call
on to the learner's process; slots are in the node's shared memory.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from unirl.core.queue import Event, MemberStatus, PoolCounts, QueueStats
from unirl.core.sample import Slot, Write
from unirl.errors import DeadlineExceeded, LeaseExpired, QueueClosed, UniRLError
from unirl.transports.remote.layout import NodeMemory
from unirl.transports.remote.wire import Frame, Kind, read_with_text, text_frame

_REPLY_SECONDS = 120.0
_PROGRESS_SECONDS = 0.1
_MEMBERS_SECONDS = 1.0
"""Each node asks who is alive, and the learner's process answers all of them."""
_ERRORS: dict[str, type[UniRLError]] = {
    "LeaseExpired": LeaseExpired, "DeadlineExceeded": DeadlineExceeded
}  # fmt: skip


class Channel:
    """One end of a pair of sockets. One call at a time; any thread may make it."""

    def __init__(self, sock: socket.socket, queue: int) -> None:
        self._sock, self.queue = sock, queue
        self._prepare()

    def _prepare(self) -> None:
        self._sock.settimeout(_REPLY_SECONDS)
        self.lock = threading.RLock()
        self.notified = False
        weakref.finalize(self, self._sock.close)

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": DupFd(self._sock.fileno()), "queue": self.queue}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sock, self.queue = socket.socket(fileno=state["fd"].detach()), state["queue"]
        self._prepare()

    def fileno(self) -> int:
        """Of the socket: readable when something is to be read, a notification above all."""
        return self._sock.fileno()

    def send(self, kind: Kind, *values: int) -> None:
        """A call whose answer is read later, or never comes."""
        self._send(Frame(kind, self.queue, 0, values).pack())

    def _send(self, *parts: bytes) -> None:
        try:
            self._sock.sendall(b"".join(parts))
        except TimeoutError:
            raise self._late() from None
        except OSError:
            raise QueueClosed from None

    def ask(self, kind: Kind, *values: int) -> tuple[Frame, Any]:
        """A call, and its answer."""
        with self.lock:
            self.send(kind, *values)
            return self.answer()

    def ask_with_text(self, kind: Kind, content: Any) -> tuple[Frame, Any]:
        """As ask, with a text."""
        with self.lock:
            self._send(*text_frame(kind, content, self.queue))
            return self.answer()

    def answer(self) -> tuple[Frame, Any]:
        """The answer to the newest call; what it says went wrong is raised."""
        while (found := self.step()) is None:
            pass
        return found

    def step(self) -> tuple[Frame, Any] | None:
        """Read one frame: None where it was a notification."""
        frame, text = self._read()
        if frame.kind is Kind.NOTIFY:
            self.notified = True
            return None
        if frame.kind is Kind.ERROR:
            raise _error(text)
        return frame, text

    def drain(self) -> None:
        """Read what is there without a call: notifications, and what was wrong with a commit."""
        with self.lock:
            while readable(self, 0.0):
                self.step()

    def _read(self) -> tuple[Frame, Any]:
        try:
            return read_with_text(self._sock)
        except TimeoutError:
            raise self._late() from None
        except OSError:
            raise QueueClosed from None

    @staticmethod
    def _late() -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the learner's process did not answer for {_REPLY_SECONDS:g} s",
            "the connection stands, and answers take milliseconds",
            "see whether the learner hangs",
        )


class RemoteClient:
    """See QueueClient.

    waits_for_commits: whether `commit` waits until the learner has the sample. If not, the slot is
    sent while the next one is filled, and a lease that had expired shows at the next acquire.
    """

    def __init__(
        self, channel: Channel, memory: NodeMemory, member: int, *, waits_for_commits: bool = True
    ) -> None:
        self._channel, self.memory, self._member = channel, memory, member
        self._waits = waits_for_commits
        self._progress_at = 0.0
        self.server: Any = None
        """Kept alive, where it is in this process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "server": None}

    @property
    def member(self) -> int:
        """The number that it joined with."""
        return self._member

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self.memory.closed

    def acquire(self, timeout: float | None = None) -> Slot:
        channel, started = self._channel, time.monotonic()
        self.memory.raise_if_closed()
        if timeout is not None and timeout <= 0:
            slot = self.try_acquire()
            if slot is None:
                raise self._nothing_free(timeout, channel.ask(Kind.DESCRIBE)[1])
            return slot
        with channel.lock:
            channel.send(Kind.ACQUIRE, 1)
            while True:
                left = None if timeout is None else started + timeout - time.monotonic()
                if not readable(channel, 1.0 if left is None else max(0.0, min(1.0, left))):
                    if left is not None and left <= 0:
                        break
                    self.memory.raise_if_closed()
                    continue
                if (found := channel.step()) is None:
                    continue
                slot = self._slot(found[0])
                slot.wait_seconds = time.monotonic() - started
                return slot
            frame, text = channel.ask(Kind.CANCEL)
            if frame.kind is Kind.GRANT:  # it crossed
                channel.answer()
                return self._slot(frame)
        assert timeout is not None
        raise self._nothing_free(timeout, text)

    def _nothing_free(self, timeout: float, description: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"member {self._member} waited {timeout:g} s for a free slot",
            description,
            "look at the log of the process that holds them, or raise the deadline",
        )

    def try_acquire(self, *, is_fair: bool = False) -> Slot | None:
        self.memory.raise_if_closed()
        frame, _ = self._channel.ask(Kind.ACQUIRE, 0, int(is_fair))
        return None if frame.kind is Kind.NONE else self._slot(frame)

    def _slot(self, frame: Frame) -> Slot:
        index, ticket, lease, pool, pool_ticket, _, saved = frame.values[:7]
        data: Mapping[str, Any] = self.memory.slots[index]
        return Slot(
            index,
            ticket,
            data,
            lease,
            self._member,
            pool,
            pool_ticket,
            used=saved - 2 if saved > 1 else None,
            is_saved=saved > 0,
            on_progress=self.progress,
            on_save=self.save,
        )

    def wait(self, seconds: float, *others: Event) -> None:
        self.memory.raise_if_closed()
        channel = self._channel
        if not channel.notified:
            poll = select.poll()
            for fd in (channel.fileno(), *(event.fileno() for event in others)):
                poll.register(fd, select.POLLIN)
            found = {fd for fd, _ in poll.poll(seconds * 1000)}
            for event in others:
                if event.fileno() in found:
                    event.wait(0.0)
        channel.drain()
        channel.notified = False

    def fileno(self) -> int:
        return self._channel.fileno()

    def commit(self, slot: Slot) -> None:
        values = (
            slot.index,
            slot.lease,
            slot.first_version,
            slot.last_version,
            -1 if slot.used is None else slot.used,
            int(slot.wait_seconds * 1e6),
            int(slot.work_seconds * 1e6),
            slot.ticket,
        )
        channel = self._channel
        if self._waits:
            channel.ask(Kind.COMMIT, *values)
        else:
            with channel.lock:
                channel.send(Kind.SUBMIT, *values)

    def discard(self, slot: Slot, reason: str) -> None:
        """See QueueClient. Raises UniRLError for a reason that was not declared."""
        reasons = self.memory.reasons
        if reason not in reasons:
            raise UniRLError(
                f"discard reason {reason!r} is unknown",
                f"declared are {', '.join(reasons)}",
                "declare it in the plan",
            )
        number = reasons.index(reason)
        self._channel.ask(Kind.DISCARD, slot.index, slot.lease, number, 0, 0, 0, 0, slot.ticket)

    def reissue(self, slot: Slot) -> None:
        self._channel.ask(Kind.REISSUE, slot.index, slot.lease, 0, 0, 0, 0, 0, slot.ticket)

    def save(self, slot: Slot, write: Write | None) -> None:
        slot.used = None if write is None else write()
        used, is_saved = -1 if slot.used is None else slot.used, int(write is not None)
        # Answered when it has arrived: what it is sent from may be written to again then.
        self._channel.ask(Kind.SAVE, slot.index, slot.lease, is_saved, 0, used, 0, 0, slot.ticket)
        slot.is_saved = write is not None

    def progress(self) -> None:
        if self._waits:
            self._channel.ask(Kind.PROGRESS, 1)
            return
        now = time.monotonic()
        if now - self._progress_at > _PROGRESS_SECONDS:
            self._progress_at = now
            self._channel.send(Kind.PROGRESS, 0)

    def leave(self) -> None:
        self._channel.ask(Kind.LEAVE)


class NodeQueue:
    """The queue as a node's agent sees it: what a supervisor of members needs of a QueueServer."""

    def __init__(self, link: Any, number: int, memory: NodeMemory) -> None:
        self._link, self.number, self.memory = link, number, memory
        self._channel: Channel = link.open_channel(number)[1]
        self._members: list[MemberStatus] = []
        self._asked_at = -math.inf

    def join(
        self, pool: int = 0, name: str = "", *, waits_for_commits: bool = False
    ) -> RemoteClient:
        """See QueueServer. The client may be sent to a process that is being started."""
        _, channel = self._link.open_channel(self.number)
        frame, _ = channel.ask_with_text(Kind.JOIN, {"pool": pool, "name": name})
        member = frame.values[0]
        return RemoteClient(channel, self.memory, member, waits_for_commits=waits_for_commits)

    def revoke(self, member: int, reason: str = "actor_died", *, reissue: bool = False) -> int:
        """See QueueServer: of this node's members."""
        number = self.memory.reasons.index(reason)
        try:
            return self._channel.ask(Kind.REVOKE, member, number, int(reissue))[0].values[0]
        except QueueClosed:
            return 0

    def retire(self, member: int) -> None:
        """See QueueServer."""
        self._channel.ask(Kind.RETIRE, member)

    def members(self) -> list[MemberStatus]:
        """Those of this node, not more often than once a second; none when all is over."""
        if time.monotonic() - self._asked_at > _MEMBERS_SECONDS:
            try:
                found = self._channel.ask(Kind.MEMBERS)[1]
            except QueueClosed:
                return []
            self._members = [MemberStatus(*each) for each in found]
            self._asked_at = time.monotonic()
        return self._members

    def stats(self) -> QueueStats:
        """Of all nodes."""
        found = self._channel.ask(Kind.STATS)[1]
        pools: Sequence[PoolCounts] = [PoolCounts(**each) for each in found.pop("pools")]
        return QueueStats(**found, pools=pools)

    def describe(self) -> str:
        """See QueueServer."""
        return str(self._channel.ask(Kind.DESCRIBE)[1])

    def buffers(self) -> NodeMemory:
        """The slots' memory on this node."""
        return self.memory

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self.memory.closed

    def close(self) -> None:
        """Let this node's members end."""
        self.memory.close()
        self._link.close_channels()


def readable(what: Any, seconds: float) -> bool:
    """Whether it is, within so many seconds."""
    poll = select.poll()
    poll.register(what.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _error(text: Any) -> Exception:
    if text["type"] == "QueueClosed":
        return QueueClosed()
    return _ERRORS.get(text["type"], UniRLError)(*text["parts"])
