"""What only the transport between machines has: strangers, broken frames, late bytes, weights that
are on their way.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.transports.queues import SPEC, fill, produce
from unirl.core.queue import QueueConfig
from unirl.core.tree import leaves
from unirl.core.weights import Weights
from unirl.errors import LeaseExpired, UniRLError
from unirl.transports.remote.hub import SLOTS
from unirl.transports.remote.layout import NodeMemory, SlotLayout, joint_digest
from unirl.transports.remote.link import NodeLink
from unirl.transports.remote.token import Token
from unirl.transports.remote.transport import RemoteTransport
from unirl.transports.remote.weights import node_store
from unirl.transports.remote.wire import Frame, Kind, read_with_text, text_frame


@pytest.fixture
def transport() -> Iterator[RemoteTransport]:
    found = RemoteTransport(silent_seconds=0.6)
    yield found
    found.close()


class RawNode:
    """A node that sends what it wants."""

    def __init__(self, transport: RemoteTransport, number: int = 1) -> None:
        hub = transport.hub
        self.sock = socket.create_connection(hub.address, 5.0)
        values = (*hub.token.words, number, SLOTS, joint_digest([SlotLayout(SPEC)]))
        self.sock.sendall(Frame(Kind.HELLO, 0, 0, values).pack())
        assert self.answer()[0].kind is Kind.WELCOME

    def answer(self) -> tuple[Frame, Any]:
        return read_with_text(self.sock)

    def ask(self, kind: Kind, *values: int) -> tuple[Frame, Any]:
        self.sock.sendall(Frame(kind, 0, 1, values).pack())
        return self.answer()

    def join(self) -> int:
        self.sock.sendall(b"".join(text_frame(Kind.JOIN, {"pool": 0, "name": "raw"}, 0, 1)))
        return self.answer()[0].values[0]


def eventually(what: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_does_not_know_the_token_is_refused_and_counted(transport: RemoteTransport) -> None:
    transport.queue(SPEC, QueueConfig())
    with pytest.raises(UniRLError, match="cannot reach the learner"):
        NodeLink(transport.hub.address, Token().data, 1, {0: NodeMemory(SPEC, QueueConfig())}, {})
    with socket.create_connection(transport.hub.address, 5.0) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n".ljust(72))
        assert sock.recv(1) == b""
    eventually(lambda: transport.hub.num_refused == 2)
    assert not transport.hub.nodes


def test_a_node_with_another_layout_is_refused(transport: RemoteTransport) -> None:
    transport.queue(SPEC, QueueConfig())
    transport.queue(SPEC, QueueConfig())
    memories = {0: NodeMemory(SPEC, QueueConfig())}
    with pytest.raises(UniRLError, match="the same UniRL"):
        NodeLink(transport.hub.address, transport.hub.token.data, 1, memories, {})


@pytest.mark.parametrize(
    "bad",
    [
        Frame(Kind.COMMIT, 0, 1, (99, 1, 0, 0, -1)).pack(),
        Frame(Kind.COMMIT, 7, 1, (0, 1, 0, 0, -1)).pack(),
        Frame(Kind.STATUS, 0, 0, (1 << 40,)).pack(),
        Frame(Kind.GRANT, 0, 1).pack(),
        b"\0" * 72,
        Frame(Kind.STATUS, 0, 0, (3,)).pack() + b"{x}",
    ],
    ids=["no such slot", "no such queue", "endless text", "not its to say", "noise", "no JSON"],
)
def test_who_breaks_the_protocol_is_lost_and_its_slots_are_given_back(
    transport: RemoteTransport, bad: bytes
) -> None:
    queue, node = transport.queue(SPEC, QueueConfig(max_staleness=0)), RawNode(transport)
    node.join()
    assert node.ask(Kind.ACQUIRE, 0)[0].kind is Kind.GRANT
    node.sock.sendall(bad)
    eventually(lambda: queue.stats().discarded["actor_died"] == 1)
    eventually(lambda: not transport.hub.nodes)
    assert produce(queue.join(), 0) == 1


def test_late_bytes_never_reach_a_slot_that_is_lent_again(transport: RemoteTransport) -> None:
    queue, zombie = transport.queue(SPEC, QueueConfig(max_staleness=0)), RawNode(transport)
    member = zombie.join()
    index, ticket, lease, *_ = zombie.ask(Kind.ACQUIRE, 0)[0].values
    payload = b"\x7f" * SlotLayout(SPEC).slot_bytes
    half = len(payload) // 2
    zombie.sock.sendall(Frame(Kind.COMMIT, 0, 1, (index, lease, 0, 0, -1)).pack() + payload[:half])
    eventually(lambda: queue.buffers().buffer(index)["obs"]["x"].eq(0x7F7F7F7F7F7F7F7F).any())
    queue.revoke(member)
    other = queue.join()
    slot = other.acquire(1.0)
    assert (slot.index, slot.ticket) == (index, ticket + 1)
    for value in (slot.data["obs"]["x"], slot.data["state"], slot.data["token"]):
        value.fill_(3)
    slot.first_version = slot.last_version = 0
    other.commit(slot)
    batch = queue.take(0, 5.0)
    zombie.sock.sendall(payload[half:])
    frame, text = zombie.answer()
    assert (frame.kind, text["type"]) == (Kind.ERROR, "LeaseExpired")
    data = batch.slots[0].data
    assert all(value.eq(3).all() for value in (data["obs"]["x"], data["state"], data["token"]))
    assert queue.stats().late == 1


def test_only_what_is_used_travels(transport: RemoteTransport) -> None:
    queue, node = transport.queue(SPEC, QueueConfig()), RawNode(transport)
    node.join()
    index, _, lease, *_ = node.ask(Kind.ACQUIRE, 0)[0].values
    views = SlotLayout(SPEC).views(memoryview(bytearray(10_000)), index, 3)
    assert sum(map(len, views)) == 3 * 2 * 8 + 2 * 4 + 3 * 8
    node.sock.sendall(
        Frame(Kind.COMMIT, 0, 1, (index, lease, 0, 0, 3)).pack() + b"\1" * sum(map(len, views))
    )
    assert node.answer()[0].kind is Kind.OK
    slot = queue.take(0, 5.0).slots[0]
    assert slot.used == 3 and slot.data["token"].ne(0).tolist() == [True] * 3 + [False] * 5


def test_a_silent_node_is_fenced_and_what_it_brings_later_is_counted(
    transport: RemoteTransport,
) -> None:
    lost: list[tuple[int, str]] = []
    transport.hub.on_lost = lambda number, why: lost.append((number, why))
    queue, node = transport.queue(SPEC, QueueConfig(max_staleness=0)), RawNode(transport, 4)
    node.join()
    values = node.ask(Kind.ACQUIRE, 0)[0].values
    eventually(lambda: bool(lost))
    assert lost[0][0] == 4 and "silent" in lost[0][1]
    assert produce(queue.join(), 0) == 1
    payload = bytes(SlotLayout(SPEC).slot_bytes)
    node.sock.sendall(Frame(Kind.COMMIT, 0, 1, (values[0], values[2], 0, 0, -1)).pack() + payload)
    assert node.answer()[1]["type"] == "LeaseExpired"
    assert node.ask(Kind.ACQUIRE, 0)[1]["type"] == "LeaseExpired"
    assert node.ask(Kind.PING)[0].kind is Kind.FENCED
    assert queue.stats().late == 2 and queue.stats().discarded["actor_died"] == 1


class Held:
    def load_weights(self, weights: Weights) -> None:
        self.value = float(weights["w"][0])


@pytest.mark.parametrize("way", ["tcp", "near"])
def test_a_slot_waits_for_the_weights_that_were_published_before_it(
    transport: RemoteTransport, way: str
) -> None:
    if way == "tcp":  # as on another machine, where nothing listens at that name
        transport.hub._listeners[1].close()
    queue = transport.queue(SPEC, QueueConfig(max_staleness=0))
    example = {"w": torch.zeros(1_000_000)}  # long on its way, compared with a grant
    weights = transport.weights(example)
    weights.publish(example, 0)
    memories, store = (
        {0: NodeMemory(SPEC, QueueConfig(max_staleness=0))},
        node_store(weights.shapes),
    )
    link = NodeLink(transport.hub.address, transport.hub.token.data, 2, memories, {0: store})
    assert {sock.family for sock in link._weight_sockets} == {
        socket.AF_INET if way == "tcp" else socket.AF_UNIX
    }
    client, held, have = link.queue(0).join(), Held(), -1
    for version in range(6):
        slot = client.acquire(5.0)
        have = store.pull(held, have)
        assert (have, held.value) == (version, version)
        fill(client, slot, have)
        batch = queue.take(version, 5.0)
        assert batch.staleness == [0]
        weights.publish({"w": torch.full((1_000_000,), float(version + 1))}, version + 1)
        queue.release(batch)
    link.close()


def test_a_commit_that_nobody_waits_for_is_refused_and_counted_without_an_answer(
    transport: RemoteTransport,
) -> None:
    queue = transport.queue(SPEC, QueueConfig(batch_size=2))
    memories = {0: NodeMemory(SPEC, QueueConfig(batch_size=2))}
    link = NodeLink(transport.hub.address, transport.hub.token.data, 2, memories, {})
    client = link.queue(0).join()
    fill(client, client.acquire(5.0), 0)
    slot = client.acquire(5.0)
    assert queue.stats().committed == 1  # what a connection carries stays in order
    queue.revoke(client.member)
    fill(client, slot, 0)
    with pytest.raises(LeaseExpired):
        client.acquire(5.0)
    assert (queue.stats().committed, queue.stats().late) == (1, 2)
    link.close()


def test_what_a_process_committed_before_it_ended_comes_before_its_end(
    transport: RemoteTransport,
) -> None:
    """Both wait in sockets of their own, where the link cannot see which was written first."""
    queue = transport.queue(SPEC, QueueConfig(batch_size=1))
    memories = {0: NodeMemory(SPEC, QueueConfig(batch_size=1))}
    link = NodeLink(transport.hub.address, transport.hub.token.data, 2, memories, {})
    agent = link.queue(0)
    client = agent.join()
    slot, held, go = client.acquire(5.0), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go.wait(5.0)

    link._loop.call(hold)
    assert held.wait(5.0)
    reason = agent.memory.reasons.index("actor_died")
    agent._channel.send(Kind.REVOKE, client.member, reason, 0)
    fill(client, slot, 0)
    go.set()
    assert agent._channel.answer()[0].values[0] == 0  # nothing is lost
    assert (queue.stats().committed, queue.stats().late) == (1, 0)
    link.close()


def test_frames_are_whole_however_they_are_cut(transport: RemoteTransport) -> None:
    """Several in one piece, and one in many: with what belongs to a slot among them."""
    queue = transport.queue(SPEC, QueueConfig(batch_size=2))
    node = RawNode(transport)
    node.join()
    index, _, lease, *_ = node.ask(Kind.ACQUIRE, 0)[0].values
    size = SlotLayout(SPEC).slot_bytes
    commit = Frame(Kind.COMMIT, 0, 1, (index, lease, 0, 0, -1)).pack() + b"\1" * size
    sent = commit + Frame(Kind.ACQUIRE, 0, 1, (0,)).pack() + Frame(Kind.PING).pack()
    for start in range(0, len(sent), 50):
        node.sock.sendall(sent[start : start + 50])
        time.sleep(1e-3)
    assert node.answer()[0].kind is Kind.OK
    index, _, lease, *_ = node.answer()[0].values
    assert node.answer()[0].kind is Kind.PONG
    submit = Frame(Kind.SUBMIT, 0, 1, (index, lease, 0, 0, -1)).pack() + b"\2" * size
    node.sock.sendall(submit + Frame(Kind.PING).pack() * 3)
    assert [node.answer()[0].kind for _ in range(3)] == [Kind.PONG] * 3
    batch = queue.take(0, 5.0)
    found = [next(iter(leaves(slot.data)))[1].view(torch.uint8).unique() for slot in batch.slots]
    assert [each.tolist() for each in found] == [[1], [2]]
