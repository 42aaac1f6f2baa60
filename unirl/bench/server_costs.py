"""What one call of the queue's server costs, measured by calling it, at any number of slots."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """Of a lease, a commit, a look for what is to be learned next, a slot that this finds, and one
    that is released.

    The defaults were measured by `benchmarks/cluster_simulation.py` on an AMD EPYC with AVX2 alone.
    """

    lease: CallCost = CallCost(15.0, 54.0)
    commit: CallCost = CallCost(8.5, 0.0)
    take: CallCost = CallCost(24.0, 493.0)
    slot: CallCost = CallCost(5.0, 0.0)
    release: CallCost = CallCost(3.0, 0.0)

    @staticmethod
    def fit(measured: Mapping[int, Mapping[str, float]]) -> ServerCosts:
        """The lines through the fewest and the most slots of `measure`."""
        few, many = min(measured), max(measured)

        def line(call: str) -> CallCost:
            slope = max(0.0, (measured[many][call] - measured[few][call]) / (many - few) * 1e3)
            return CallCost(max(0.1, measured[few][call] - slope * few / 1e3), slope)

        return ServerCosts(*map(line, ("lease", "commit", "take", "slot", "release")))


def measure(num_slots: Sequence[int], num_calls: int = 64) -> dict[int, dict[str, float]]:
    """Core-microseconds of each call by number of slots: the median of so many calls of a real
    server, with half of the slots running and the others finished or free. `members` and `revoke`
    are of a queue in which 8 slots come to a member.
    """
    return {number: _measure(number, num_calls) for number in num_slots}


def _measure(num_slots: int, num_calls: int) -> dict[str, float]:
    # A batch of one, so that each `take` looks once.
    server = LocalTransport().queue(_SPEC, QueueConfig(1, num_slots - 1, window=None))
    clients = [server.join() for _ in range(min(1000, max(1, num_slots // 8)))]
    held = [client.try_acquire() for client in clients for _ in range(8)]
    slots = [slot for slot in held if slot is not None]
    by_member = {client.member: client for client in clients}
    while (slot := clients[0].try_acquire()) is not None:
        slots.append(slot)
    for slot in slots:
        slot.first_version = slot.last_version = 0
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.thread_time()
        found = call()
        spent[name].append(time.thread_time() - started)
        return found

    # Old tickets first, as they are finished in a run.
    for slot in slots[: num_slots // 2 + 1]:
        timed("commit", partial(by_member[slot.member].commit, slot))
    for _ in range(min(num_calls, num_slots // 2 + 1)):
        batch = timed("take", partial(server.take, 0))
        timed("slot", partial(server._slot, batch.slots[0].index))
        timed("release", partial(server.release, batch))
        timed("lease", clients[0].try_acquire)
    timed("members", server.members)
    timed("stats", server.stats)
    timed("revoke", partial(server.revoke, clients[-1].member))
    return {name: statistics.median(values) * 1e6 for name, values in spent.items()}
