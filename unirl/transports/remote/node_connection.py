"""What the learner's process does for one node: each frame that comes is a call on behalf of one of
the node's members, answered at once, or parked until a slot is free.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unirl.core.sample import Slot
from unirl.errors import LeaseExpired, QueueClosed, UniRLError
from unirl.transports.remote.wire import (
    COMMITS,
    Frame,
    Kind,
    ProtocolError,
    Stream,
    pieces,
    text_frame,
)
from unirl.transports.table_queue import TableClient

if TYPE_CHECKING:
    from unirl.transports.remote.hub import Hub

log = logging.getLogger(__name__)

_SCRATCH = bytearray(1 << 18)
"""Where bytes go that come with an expired lease."""
_ERRORS = (LeaseExpired, QueueClosed, UniRLError)


class NodeConnection:
    """One node. All of it belongs to the hub's thread."""

    def __init__(self, hub: Hub, number: int, stream: Stream) -> None:
        self.hub, self.number, self.stream = hub, number, stream
        self.clients: dict[int, tuple[int, TableClient]] = {}
        """By channel: the queue's number, and the member."""
        self.members: set[tuple[int, int]] = set()
        """Queue and number of those who joined here and were not revoked by the node."""
        self.listening: set[int] = set()
        """Channels whose members know that nothing is free."""
        self.fenced = False
        """It was silent for too long, and its leases have ended: it is refused."""
        self.receiving: tuple[int, int] | None = None
        """The queue and slot that a commit is being received in."""

    # -- what comes --------------------------------------------------------------------------------

    def target(self, frame: Frame) -> Sequence[memoryview]:
        """Where the bytes after a header go: see Stream."""
        self.receiving = None
        if not frame.carries_slot:
            return ()
        server = self.hub.server(frame.queue)
        if server is None:
            raise ProtocolError(f"queue {frame.queue} is unknown")
        views, good = server.place_for(frame)
        if good and frame.kind is Kind.SAVE:
            server.forget_saved(frame.values[0])
        number = sum(map(len, views))
        if not good:
            return pieces(number, _SCRATCH)
        # A zombie's bytes may still be on their way into the slot that is another's by now.
        self.hub.redirect(frame.queue, frame.values[0], self)
        self.receiving = (frame.queue, frame.values[0])
        return views

    def redirect(self) -> None:
        """What is still to come of this commit goes nowhere."""
        self.stream.redirect(_SCRATCH)
        self.receiving = None

    def handle(self, frame: Frame, text: Any) -> None:
        """One call of a member; its errors are answers."""
        self.receiving = None
        if frame.kind is Kind.PING:
            self.stream.send(Frame(Kind.FENCED if self.fenced else Kind.PONG).pack())
        elif frame.kind is Kind.STATUS:
            self.hub.statuses[self.number] = text
        elif frame.kind is Kind.GONE:  # a process of the node has ended; its member is revoked next
            self.clients.pop(frame.channel, None)
            self.listening.discard(frame.channel)
        else:
            try:
                self._call(frame, text)
            except _ERRORS as error:
                # That the lease of a commit had expired is no news to who did not wait for it: the
                # member was revoked, as its next acquire will say.
                if not (frame.kind is Kind.SUBMIT and isinstance(error, LeaseExpired)):
                    self._fail(frame, error)

    def _call(self, frame: Frame, text: Any) -> None:
        server = self.hub.server(frame.queue)
        if server is None:
            raise QueueClosed
        kind, values = frame.kind, frame.values
        if kind is Kind.JOIN:
            if self.fenced:
                raise QueueClosed
            client = server.join_here(int(text["pool"]), str(text["name"]))
            self.clients[frame.channel] = (frame.queue, client)
            self.members.add((frame.queue, client.member))
            self._answer(frame, Kind.OK, client.member)
        elif kind is Kind.RETIRE:
            self._require_own(frame)
            server.retire(values[0])
            self._answer(frame, Kind.OK)
        elif kind is Kind.REVOKE:
            self._require_own(frame)
            self.members.discard((frame.queue, values[0]))
            reason = server.memory.reasons[values[1] % len(server.memory.reasons)]
            number = server.revoke(values[0], reason, reissue=bool(values[2]))
            self._answer(frame, Kind.OK, number)
        elif kind is Kind.MEMBERS:
            found = [
                list(vars(each).values())
                for each in server.members()
                if (frame.queue, each.member) in self.members
            ]
            self._say(frame, found)
        elif kind is Kind.STATS:
            self._say(frame, asdict(server.stats()))
        elif kind is Kind.DESCRIBE:
            self._say(frame, server.describe_table())
        else:
            self._call_of_member(frame)

    def _call_of_member(self, frame: Frame) -> None:
        if frame.channel not in self.clients:
            raise LeaseExpired(f"channel {frame.channel} has no member", "", "join first")
        client = self.clients[frame.channel][1]
        kind, values = frame.kind, frame.values
        if kind is Kind.ACQUIRE:
            if not self.try_grant(frame, client):
                if values[0]:
                    self.hub.park(frame, client.pool, self)
                else:
                    self.listening.add(frame.channel)
                    self._answer(frame, Kind.NONE)
        elif kind is Kind.CANCEL:
            self.hub.unpark(frame, self)
            server = self.hub.server(frame.queue)
            self._say(frame, "" if server is None else server.describe_table())
        elif kind is Kind.PROGRESS:
            client.progress()
            if values[0]:
                self._answer(frame, Kind.OK)
        elif kind is Kind.LEAVE:
            client.leave()
            self._answer(frame, Kind.OK)
        else:
            slot = _slot_of(client, values)
            if kind in COMMITS:
                client.commit(slot)
                if kind is Kind.SUBMIT:
                    return
            elif kind is Kind.SAVE:
                client.mark_saved(slot, values[4] if values[2] else None)
            elif kind is Kind.REISSUE:
                client.reissue(slot)
            elif kind is Kind.DISCARD:
                reasons = client.memory.reasons
                client.discard(slot, reasons[values[2] % len(reasons)])
            else:
                raise ProtocolError(f"a node sent {kind.name}")
            self._answer(frame, Kind.OK)

    def try_grant(self, frame: Frame, client: TableClient) -> bool:
        """Lend the member a slot, if there is one for it."""
        slot = client.try_acquire(is_fair=bool(frame.values[1]))
        if slot is None:
            return False
        self.listening.discard(frame.channel)
        server = self.hub.server(frame.queue)
        version = -1 if server is None else server.version_at_start(slot.index)
        saved = 0 if not slot.is_saved else 1 if slot.used is None else slot.used + 2
        values = (slot.index, slot.ticket, slot.lease, slot.pool, slot.pool_ticket, version, saved)
        header = Frame(Kind.GRANT, frame.queue, frame.channel, values).pack()
        views = server.views(slot.index, slot.used) if saved and server is not None else ()
        self.stream.send(header, *views)
        return True

    def answer_parked(self, frame: Frame, client: TableClient) -> bool:
        """As try_grant, where errors are answers too; whether it was answered."""
        try:
            return self.try_grant(frame, client)
        except _ERRORS as error:
            self._fail(frame, error)
            return True

    def notify(self, queue: int, pool: int) -> None:
        """Tell members that were refused that a slot may be free."""
        for channel in [*self.listening]:
            number, client = self.clients.get(channel, (-1, None))
            if client is None:
                self.listening.discard(channel)
            elif number == queue and client.pool == pool and client.may_acquire():
                self.listening.discard(channel)
                self.stream.send(Frame(Kind.NOTIFY, queue, channel).pack())

    # -- answers -----------------------------------------------------------------------------------

    def _answer(self, frame: Frame, kind: Kind, *values: int) -> None:
        self.stream.send(Frame(kind, frame.queue, frame.channel, values).pack())

    def _say(self, frame: Frame, content: Any) -> None:
        self.stream.send(*text_frame(Kind.TEXT, content, frame.queue, frame.channel))

    def _fail(self, frame: Frame, error: Exception) -> None:
        parts = error.parts if isinstance(error, UniRLError) else ()
        content = {"type": type(error).__name__, "parts": [part[:2000] for part in parts]}
        self.stream.send(*text_frame(Kind.ERROR, content, frame.queue, frame.channel))

    def _require_own(self, frame: Frame) -> None:
        if (frame.queue, frame.values[0]) not in self.members:
            raise UniRLError(
                f"node {self.number} speaks for member {frame.values[0]}",
                "a node speaks for its own members",
                "restart the run",
            )

    def revoke_all(self, reason: str) -> int:
        """End all leases of the node's members; how many there were."""
        number = 0
        for queue, member in self.members:
            server = self.hub.server(queue)
            if server is not None:
                number += server.revoke(member, reason, reissue=server.reissue)
        return number


def _slot_of(client: TableClient, values: tuple[int, ...]) -> Slot:
    index, lease, first, last, used, wait_us, work_us, ticket = values
    if not 0 <= index < client.memory.config.num_slots:
        raise ProtocolError(f"slot {index} of {client.memory.config.num_slots}")
    return Slot(
        index,
        ticket,
        {},
        lease,
        client.member,
        client.pool,
        first_version=first,
        last_version=last,
        used=None if used < 0 else used,
        wait_seconds=wait_us / 1e6,
        work_seconds=work_us / 1e6,
    )


Parked = deque[tuple[Frame, NodeConnection]]
