"""Queues of every transport, and the few lines that all tests of them need."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from unirl.core.queue import QueueClient, QueueConfig
from unirl.core.sample import Field, SampleSpec, Slot
from unirl.core.transport import Transport
from unirl.transports.local import LocalTransport
from unirl.transports.remote.transport import RemoteTransport
from unirl.transports.shared import SharedTransport
from unirl.transports.table_server import TableServer


@functools.cache
def remote() -> RemoteTransport:
    """One for all tests of a process: its queues have nothing in common but its thread."""
    transport = RemoteTransport()
    atexit.register(transport.close)  # its thread must not outlive the interpreter
    return transport


TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "local": LocalTransport,
    "shared": SharedTransport,
    "remote": remote,
}
SPEC = SampleSpec(
    {
        "obs/x": Field((3, 2), torch.int64),
        "state": Field((2,), torch.float32, batch_axis=0),
        "token": Field((8,), torch.int64, batch_axis=None, is_variable=True),
    }
)
MakeQueue = Callable[..., TableServer]


def make(kind: str, shares: Sequence[float] = (1.0,), **settings: Any) -> TableServer:
    queue = TRANSPORTS[kind]().queue(SPEC, QueueConfig(**settings), shares=shares)
    assert isinstance(queue, TableServer)
    return queue


@pytest.fixture(params=list(TRANSPORTS))
def make_queue(request: pytest.FixtureRequest) -> MakeQueue:
    """A queue of each transport: make_queue(max_staleness=0, shares=(3, 1))."""
    return lambda **settings: make(request.param, **settings)


def fill(client: QueueClient, slot: Slot, version: int) -> None:
    """Write the ticket all over the slot and commit it."""
    slot.data["obs"]["x"].fill_(slot.ticket)
    slot.first_version = slot.last_version = version
    client.commit(slot)


def produce(client: QueueClient, version: int) -> int:
    """One sample from start to end; its ticket."""
    slot = client.acquire(0.0)
    fill(client, slot, version)
    return slot.ticket
