"""The transport within one process: plain memory, any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unirl.core.queue import REASONS, QueueConfig
from unirl.core.sample import SampleSpec
from unirl.core.weights import Loadable, Weights
from unirl.errors import LockHeld
from unirl.transports.events import FdEvent
from unirl.transports.memory import LocalCells, require_memory
from unirl.transports.slot_table import num_cells
from unirl.transports.table_server import TableServer


class LocalQueueMemory:
    """A queue's table and slots for the threads of one process."""

    spin_seconds = 0.0

    def __init__(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        shares: Sequence[float],
        reasons: Sequence[str],
    ) -> None:
        if spec.device == "cpu":
            require_memory(config.num_slots * spec.num_bytes, "the queue's slots")
        self.config, self.shares, self.reasons = config, shares, reasons
        self.cells = LocalCells(num_cells(config.num_slots, len(shares), len(reasons))).view()
        self.slots = self._allocate(spec, config.num_slots)
        self.lock = threading.Lock()
        self.learner_event = FdEvent()
        self.pool_events = [FdEvent() for _ in shares]
        self.write_events: dict[int, Any] = {}

    def _allocate(self, spec: SampleSpec, number: int) -> list[Mapping[str, Any]]:
        return [spec.allocate() for _ in range(number)]


class LocalTransport:
    """takes_turns: learner and actors are never at work at once; weights are lent, not copied."""

    def __init__(self, *, takes_turns: bool = False) -> None:
        self._takes_turns = takes_turns

    def queue(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        *,
        shares: Sequence[float] = (1.0,),
        reasons: Sequence[str] = REASONS,
    ) -> TableServer:
        return TableServer(LocalQueueMemory(spec, config, shares, reasons))

    def weights(self, example: Weights) -> LentWeightStore | LocalWeightStore:
        return LentWeightStore() if self._takes_turns else LocalWeightStore()

    def cells(self, number: int) -> LocalCells:
        return LocalCells(number)

    def event(self) -> FdEvent:
        return FdEvent()

    def end_lock_holders_by(self, end: Callable[[LockHeld], bool]) -> None:
        """See Transport. A thread of this process cannot be ended."""


class LentWeightStore:
    """The weight store where learner and actors take turns: the learner's own weights. They change
    and are published again before anybody pulls.
    """

    lends = True

    def __init__(self) -> None:
        self._weights: Weights = {}
        self.version = -1

    def publish(self, weights: Weights, version: int) -> None:
        self._weights, self.version = weights, version

    def pull(self, into: Loadable, have: int) -> int:
        if self.version != have:
            into.load_weights(self._weights)
        return self.version


class LocalWeightStore:
    """The weight store for threads of one process: one copy of the weights behind a lock."""

    lends = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, torch.Tensor] = {}
        self._version = -1

    @property
    def version(self) -> int:
        return self._version

    def publish(self, weights: Weights, version: int) -> None:
        with self._lock, torch.no_grad():
            if not self._held:
                self._held = {name: value.detach().clone() for name, value in weights.items()}
            else:
                torch._foreach_copy_(
                    list(self._held.values()), [weights[name] for name in self._held]
                )
            self._version = version

    def pull(self, into: Loadable, have: int) -> int:
        with self._lock:
            if self._version != have:
                into.load_weights(self._held)
            return self._version
