"""Where the slots of a queue are in one block of memory: the same in the learner's process and on
every node, so that a slot travels as the bytes it is made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from unirl.core.queue import REASONS, QueueConfig
from unirl.core.sample import SampleSpec
from unirl.core.tree import unflatten
from unirl.errors import QueueClosed, UniRLError
from unirl.transports.memory import SharedBlock, SharedCells, aligned_offsets


class SlotLayout:
    """Offsets of a slot's fields, and how many bytes of it a commit carries."""

    def __init__(self, spec: SampleSpec) -> None:
        self.spec = spec
        sizes = {name: item.num_bytes for name, item in spec.fields.items()}
        self._offsets, self.slot_bytes = aligned_offsets(sizes)
        self._has_variable = any(item.is_variable for item in spec.fields.values())

    @property
    def digest(self) -> int:
        """A number that two sides with the same layout share."""
        text = repr(
            [(name, item.shape, str(item.dtype)) for name, item in self.spec.fields.items()]
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def tree(self, block: SharedBlock, index: int) -> dict[str, Any]:
        """The tensors of a slot."""
        start = index * self.slot_bytes
        return unflatten(
            {
                name: block.tensor(start + self._offsets[name], item.shape, item.dtype)
                for name, item in self.spec.fields.items()
            }
        )

    def views(self, buffer: memoryview, index: int, used: int | None) -> list[memoryview]:
        """The bytes that a commit of this slot carries, in order."""
        start = index * self.slot_bytes
        if not self._has_variable or used is None:
            return [buffer[start : start + self.slot_bytes]]
        found = []
        for name, item in self.spec.fields.items():
            begin, length = start + self._offsets[name], item.num_bytes
            if item.is_variable and item.shape[0]:
                length = length // item.shape[0] * min(max(used, 0), item.shape[0])
            found.append(buffer[begin : begin + length])
        return found


def joint_digest(layouts: Iterable[SlotLayout]) -> int:
    """What several queues' layouts together are known by."""
    found = 0
    for layout in layouts:
        found = (found * 31 + layout.digest) % (1 << 61)
    return found


class NodeMemory:
    """A queue's slots on a node, shared by the processes there. See SlotBuffers.

    Each slot has its place on every node: which processes of which node may write to it is decided
    by leases alone. Picklable while a process is being started.
    """

    def __init__(
        self, spec: SampleSpec, config: QueueConfig, reasons: Sequence[str] = REASONS
    ) -> None:
        self.config, self.reasons, self._spec = config, tuple(reasons), spec
        number = max(1, SlotLayout(spec).slot_bytes * config.num_slots)
        self._block = SharedBlock(number, "unirl-node-slots")
        self._flag = SharedCells(1, "unirl-node-closed")
        self._attach()

    def _attach(self) -> None:
        if self._spec.device != "cpu":
            raise UniRLError(
                f"slots on device {self._spec.device} are to travel between machines",
                "what travels is in the memory of the CPU",
                "let the recipe declare its slots on the CPU",
            )
        self.layout = SlotLayout(self._spec)
        self.bytes = memoryview(self._block.buffer)
        self._closed = self._flag.view()
        self.slots: list[Mapping[str, Any]] = [
            self.layout.tree(self._block, index) for index in range(self.config.num_slots)
        ]

    def __getstate__(self) -> dict[str, Any]:
        names = ("config", "reasons", "_spec", "_block", "_flag")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return bool(self._closed[0])

    def close(self) -> None:
        """Let all processes of this node know that the queue is closed."""
        self._closed[0] = 1

    def raise_if_closed(self) -> None:
        """QueueClosed where it is."""
        if self.closed:
            raise QueueClosed

    def buffer(self, index: int) -> Mapping[str, torch.Tensor]:
        """The tree of one slot."""
        return self.slots[index]
