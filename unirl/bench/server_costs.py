"""What one call of the queue's server costs, measured by calling it, at any number of slots."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unirl.core.queue import QueueConfig
from unirl.core.sample import Field, SampleSpec
from unirl.transports.local import LocalTransport

_SPEC = SampleSpec({"nothing": Field((1,), torch.float32, batch_axis=0)})


@dataclass(frozen=True)
class CallCost:
    """Core-microseconds of one call, and what each 1 000 slots of the queue add to it."""

    fixed_us: float
    us_per_1000_slots: float

    def seconds(self, num_slots: int) -> float:
        return (self.fixed_us + self.us_per_1000_slots * num_slots / 1e3) / 1e6


@dataclass(frozen=True)
class ServerCosts:
    """Of a lease, a commit, a look for the slot to learn next, and a slot that is released.

    The defaults were measured by `benchmarks/cluster_simulation.py` on an AMD EPYC with AVX2 alone.
    """

    lease: CallCost = CallCost(15.0, 54.0)
    commit: CallCost = CallCost(8.5, 0.0)
    take: CallCost = CallCost(24.0, 493.0)
    release: CallCost = CallCost(3.0, 0.0)

    @staticmethod
    def fit(measured: Mapping[int, Mapping[str, float]]) -> ServerCosts:
        """The lines through the fewest and the most slots of `measure`."""
        few, many = min(measured), max(measured)

        def line(call: str) -> CallCost:
            slope = max(0.0, (measured[many][call] - measured[few][call]) / (many - few) * 1e3)
            return CallCost(max(0.1, measured[few][call] - slope * few / 1e3), slope)

        return ServerCosts(line("lease"), line("commit"), line("take"), line("release"))


def measure(num_slots: Sequence[int], num_calls: int = 64) -> dict[int, dict[str, float]]:
    """Core-microseconds of each call by number of slots: the median of so many calls of a real
    server, with half of the slots running and the others finished or free. `members` and `revoke`
    are of a queue in which 8 slots come to a member.
    """
    return {number: _measure(number, num_calls) for number in num_slots}


def _measure(num_slots: int, num_calls: int) -> dict[str, float]:
    batch_size = min(num_calls, max(1, num_slots // 4))
    config = QueueConfig(batch_size, math.ceil(num_slots / batch_size) - 1, window=None)
    server = LocalTransport().queue(_SPEC, config)
    clients = [server.join() for _ in range(min(1000, max(1, num_slots // 8)))]
    held = [client.try_acquire() for client in clients for _ in range(8)]
    slots = [slot for slot in held if slot is not None]
    by_member = {client.member: client for client in clients}
    while (slot := clients[0].try_acquire()) is not None:
        slots.append(slot)
    for slot in slots:
        slot.first_version = slot.last_version = 0
    spent: dict[str, list[float]] = {"commit": [], "take": [], "release": [], "lease": []}
    # Old tickets first, as they are finished in a run.
    for index, slot in enumerate(slots[: max(batch_size, num_slots // 2)]):
        started = time.thread_time()
        by_member[slot.member].commit(slot)
        if index < num_calls:
            spent["commit"].append(time.thread_time() - started)
    # A batch at a time is all that `take` gives: it looks once for each slot.
    started = time.thread_time()
    batch = server.take(0)
    spent["take"].append((time.thread_time() - started) / batch_size)
    started = time.thread_time()
    server.release(batch)
    spent["release"].append((time.thread_time() - started) / batch_size)
    for client in (clients * num_calls)[: min(num_calls, batch_size)]:
        started = time.thread_time()
        client.try_acquire()
        spent["lease"].append(time.thread_time() - started)
    started = time.thread_time()
    server.members()
    spent["members"] = [time.thread_time() - started]
    started = time.thread_time()
    server.stats()
    spent["stats"] = [time.thread_time() - started]
    started = time.thread_time()
    server.revoke(clients[-1].member)
    spent["revoke"] = [time.thread_time() - started]
    return {name: statistics.median(values) * 1e6 for name, values in spent.items()}
