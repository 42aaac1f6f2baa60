"""The transport between processes of one machine: slots and weights in anonymous shared memory.

The memory is a file without a name (memfd), so nothing can stay behind in /dev/shm however a run
ends. The table's lock is a POSIX record lock: the kernel frees it when its holder dies. Sleepers
wait at eventfds. Every object here is picklable while a child process is being started, and only
then: what travels are file descriptors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unirl.core.queue import REASONS, QueueConfig
from unirl.core.sample import SampleSpec
from unirl.core.tree import unflatten
from unirl.core.weights import Weights
from unirl.errors import LockHeld
from unirl.transports.events import FdEvent
from unirl.transports.locks import ProcessLock
from unirl.transports.memory import SharedBlock, SharedCells, aligned_offsets, require_memory
from unirl.transports.shared_weights import SharedWeightStore
from unirl.transports.slot_table import num_cells
from unirl.transports.table_server import TableServer


class SharedQueueMemory:
    """See QueueMemory. Actors write slots in place, the learner reads them in place."""

    # Waking a process takes 50 to 200 microseconds, several times as long as copying a slot.
    spin_seconds = 100e-6

    def __init__(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        shares: Sequence[float],
        reasons: Sequence[str],
    ) -> None:
        require_memory(config.num_slots * spec.num_bytes, "the queue's slots")
        self.config, self.shares, self.reasons = config, shares, reasons
        self.lock, self.learner_event = ProcessLock(), FdEvent()
        self.pool_events = [FdEvent() for _ in shares]
        self._spec = spec
        self._table = SharedCells(
            num_cells(config.num_slots, len(shares), len(reasons)), "unirl-table"
        )
        _, slot_bytes = self._layout()
        self._block = SharedBlock(max(1, slot_bytes * config.num_slots), "unirl-slots")
        self._attach()

    def _layout(self) -> tuple[dict[str, int], int]:
        """Where a slot's fields are, and how long it is, in bytes."""
        return aligned_offsets({name: item.num_bytes for name, item in self._spec.fields.items()})

    def _attach(self) -> None:
        self.cells = self._table.view()
        self.write_events: dict[int, Any] = {}
        offsets, slot_bytes = self._layout()
        self.slots = [
            unflatten(
                {
                    name: self._block.tensor(
                        index * slot_bytes + offsets[name], item.shape, item.dtype
                    )
                    for name, item in self._spec.fields.items()
                }
            )
            for index in range(self.config.num_slots)
        ]

    def __getstate__(self) -> dict[str, Any]:
        views = ("cells", "slots", "write_events")
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()


class SharedTransport:
    def __init__(self) -> None:
        self._locks: list[ProcessLock] = []

    def queue(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        *,
        shares: Sequence[float] = (1.0,),
        reasons: Sequence[str] = REASONS,
    ) -> TableServer:
        memory = SharedQueueMemory(spec, config, shares, reasons)
        self._locks.append(memory.lock)
        return TableServer(memory)

    def weights(self, example: Weights) -> SharedWeightStore:
        return SharedWeightStore(example)

    def cells(self, number: int) -> SharedCells:
        return SharedCells(number, "unirl-cells")

    def event(self) -> FdEvent:
        return FdEvent()

    def end_lock_holders_by(self, end: Callable[[LockHeld], bool]) -> None:
        """See Transport: in this process, for the queues made so far. Otherwise such a holder is a
        LockHeld error.
        """
        for lock in self._locks:
            lock.end_holder = end
