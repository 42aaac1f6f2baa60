"""What travels: a SampleSpec declares it, a Slot is one buffer it is written to, a Batch is what
the learner gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from unirl.core.tree import Path, leaf_at, unflatten
from unirl.errors import UniRLError


@dataclass(frozen=True)
class Field:
    """One tensor of a sample: shape and dtype, and the axis along which several slots join into a
    batch.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_axis: int | None = 1
    """The axis that grows when slots are batched: 1 for time-major [T, B, ...], 0 for [B, ...],
    None: never joined.
    """
    is_variable: bool = False
    """Only the first `Slot.used` entries along axis 0 hold data; all of them where `used` is None.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of one such tensor, without alignment."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class SampleSpec:
    """Names, shapes and dtypes of everything a slot holds, as flat paths ("obs/camera"); nothing
    else travels.
    """

    fields: Mapping[str, Field]
    device: str = "cpu"
    """Where the buffers are: elsewhere than on the CPU only in the inline runner."""
    resets_in_step: bool = False
    """What follows a row that ends an episode: the first observation of the next one, instead of
    the true final observation and a filler row.
    """

    def __post_init__(self) -> None:
        for name, item in self.fields.items():
            if item.batch_axis is not None and not 0 <= item.batch_axis < len(item.shape):
                raise UniRLError(
                    f"field {name!r} of shape {item.shape} has no axis {item.batch_axis} to batch",
                    f"0 <= batch_axis < {len(item.shape)} must hold",
                    "set batch_axis to the environments' axis, or None",
                )

    @property
    def num_bytes(self) -> int:
        """Payload bytes of one slot."""
        return sum(item.num_bytes for item in self.fields.values())

    def used_part(self, data: Mapping[str, Any], used: int | None) -> dict[str, Any]:
        """Views of what a commit said is used: all that a transport has to carry."""
        flat = {}
        for name, item in self.fields.items():
            leaf = leaf_at(data, tuple(name.split("/")))
            flat[name] = leaf[:used] if item.is_variable and used is not None else leaf
        return unflatten(flat)

    def allocate(self, num_slots: int = 1) -> dict[str, Any]:
        """A zeroed tree that holds `num_slots` samples joined along their batch axes.

        Of several samples, fields without a batch axis are left out.
        """
        flat = {}
        for name, item in self.fields.items():
            shape = list(item.shape)
            if item.batch_axis is not None:
                shape[item.batch_axis] *= num_slots
            elif num_slots > 1:
                continue  # never joined: read it slot by slot
            flat[name] = torch.zeros(shape, dtype=item.dtype, device=self.device)
        return unflatten(flat)


Write: TypeAlias = Callable[[], int | None]
"""Fills a slot's data and returns how much of it is used."""


@dataclass
class Slot:
    """The right to produce one sample, and the buffer to write it to: committed, discarded or
    reissued, always. `data` is the tree of the spec, written in place.
    """

    index: int
    """Which of the queue's buffers."""
    ticket: int
    """The sample's id: tickets are numbered in the order in which samples are started."""
    data: Mapping[str, Any]
    lease: int = 0
    """The number of this right. Once it is revoked, whatever still comes with it is refused."""
    member: int = 0
    """Who holds the slot: the number that `QueueServer.join` gave."""
    pool: int = 0
    """Index of the pool that produces this sample."""
    pool_ticket: int = 0
    """The number of the ticket within its pool: where the pool's data is, such as its prompts."""
    first_version: int = -1
    """Version of the oldest weights that acted in this sample: its age is judged by this one."""
    last_version: int = -1
    used: int | None = None
    """Entries of the variable fields that hold data, set before the commit. None: all."""
    wait_seconds: float = 0.0
    """How long the actor waited for this slot."""
    work_seconds: float = 0.0
    """How long the actor worked to fill it."""
    write_event: Any = None
    """Of a device that still writes: a CUDA event that a reader's stream waits for."""
    is_saved: bool = False
    """It holds what was saved of this sample, `used` of it: by an earlier holder, if just acquired.
    """
    on_progress: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    on_save: Callable[[Slot, Write | None], None] | None = field(
        default=None, repr=False, compare=False
    )

    def progress(self) -> None:
        """A sign of life: the actor works on this slot and does not hang. Costs a microsecond."""
        if self.on_progress is not None:
            self.on_progress()

    def save(self, write: Write | None) -> None:
        """See QueueClient.save."""
        if self.on_save is not None:
            self.on_save(self, write)

    def wait_written(self) -> None:
        """Let the reader's stream wait until the slot is written; the host does not."""
        if self.write_event is not None:
            # Of the event's own device, which need not be the current one.
            torch.cuda.current_stream(self.write_event.device).wait_event(self.write_event)


@dataclass
class Batch:
    """What `take` hands to the learner: finished slots, read in place until `release`."""

    slots: Sequence[Slot]
    version: int
    """The learner's version when the batch was taken."""
    wait_seconds: float = 0.0
    """How long the learner waited for it."""

    @property
    def staleness(self) -> list[int]:
        """Age of each slot in updates."""
        return [self.version - slot.first_version for slot in self.slots]


def collate(
    batch: Batch, spec: SampleSpec, out: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """The batch as one tree: the slot itself when it is alone (no copy), else one copy of each slot
    into `out`.

    out: a tree from `spec.allocate(len(batch.slots))`, written in place; allocated when None.
    """
    if len(batch.slots) == 1:
        return batch.slots[0].data
    joined = out if out is not None else spec.allocate(len(batch.slots))
    for name, item in spec.fields.items():
        path: Path = tuple(name.split("/"))
        if item.batch_axis is not None:
            sources = [leaf_at(slot.data, path) for slot in batch.slots]
            torch.cat(sources, dim=item.batch_axis, out=leaf_at(joined, path))
    return joined
