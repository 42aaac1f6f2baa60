"""The learner's side of a queue whose members are on other machines: the one table is here, and so
are the slots that the learner reads, into which what nodes send is received in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unirl.core.queue import QueueClient
from unirl.core.sample import SampleSpec
from unirl.transports import slot_table as at
from unirl.transports.local import LocalQueueMemory
from unirl.transports.memory import SharedBlock
from unirl.transports.remote.client import NodeQueue
from unirl.transports.remote.layout import SlotLayout
from unirl.transports.remote.wire import Frame, ProtocolError
from unirl.transports.table_queue import TableClient
from unirl.transports.table_server import TableServer


class RemoteQueueMemory(LocalQueueMemory):
    """All slots are in one block, as on the nodes."""

    def _allocate(self, spec: SampleSpec, number: int) -> list[Mapping[str, Any]]:
        self.spec, self.layout = spec, SlotLayout(spec)
        self._block = SharedBlock(max(1, self.layout.slot_bytes * number), "unirl-slots")
        self.bytes = memoryview(self._block.buffer)
        return [self.layout.tree(self._block, index) for index in range(number)]


class RemoteServer(TableServer):
    """A TableServer whose clients are reached over connections.

    reissue: what a lost node held is issued again, instead of discarded.
    """

    memory: RemoteQueueMemory

    def __init__(
        self,
        memory: RemoteQueueMemory,
        number: int,
        join_remote: Callable[[RemoteServer, int, str], QueueClient],
    ) -> None:
        super().__init__(memory)
        self.number, self._join_remote = number, join_remote
        self.reissue = False
        self.local_node: NodeQueue | None = None
        """Where members of this process are, if it has any."""

    def join(self, pool: int = 0, name: str = "") -> QueueClient:
        """See QueueServer. The client may be sent to other processes of this machine."""
        return self._join_remote(self, pool, name)

    def close(self) -> None:
        super().close()
        if self.local_node is not None:
            self.local_node.memory.close()

    def join_here(self, pool: int, name: str) -> TableClient:
        """The member's place in the table, through which its node's connection acts for it."""
        return self.new_member(pool, name)

    def describe_table(self) -> str:
        """As `describe`, for those who know members by their numbers."""
        return self._table.describe({})

    def version_at_start(self, index: int) -> int:
        """The learner's version when a running slot was lent."""
        return self._table.cells[self._table.rows[index] + at.START_VERSION]

    def place_for(self, frame: Frame) -> tuple[list[memoryview], bool]:
        """Where the bytes of a commit belong, and whether its lease is good so far: if not, they
        must not go there.
        """
        index, lease, used = frame.values[0], frame.values[1], frame.values[4]
        if not 0 <= index < self.config.num_slots:
            raise ProtocolError(f"slot {index} of {self.config.num_slots}")
        cells, row = self._table.cells, self._table.rows[index]
        good = cells[row + at.LEASE] == lease and cells[row + at.STATE] == at.RUNNING
        return self.views(index, None if used < 0 else used), good

    def views(self, index: int, used: int | None) -> list[memoryview]:
        """The used part of a slot; None: all of it."""
        return self.memory.layout.views(self.memory.bytes, index, used)

    def forget_saved(self, index: int) -> None:
        """What was saved is being written over: should its node be lost now, there is nothing."""
        self._table.cells[self._table.rows[index] + at.SAVED] = 0
