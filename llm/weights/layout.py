"""How weights are packed one after the other into a single piece of memory: what travels between a
learner's process and an inference engine's is this piece, and a table in plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.core.weights import Weights
from unirl.device import copy_weights

_ALIGNMENT = 64
"""Bytes: no tensor begins within another one's cache line, so kernels may read it there."""


@dataclass(frozen=True)
class TensorSpan:
    """Where one tensor is: its first byte, and how to read from there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        return self.offset + -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class MemoryLayout:
    """The spans of all tensors, in the order of the weights."""

    spans: tuple[TensorSpan, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole memory. Sender and receiver of a broadcast must agree on it to the byte."""
        return max((one.end for one in self.spans), default=0)

    @classmethod
    def of(cls, weights: Weights, dtype: torch.dtype | None = None) -> MemoryLayout:
        """One span per tensor. dtype: what floating-point numbers become on the way."""
        spans, offset = [], 0
        for name, value in weights.items():
            kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
            spans.append(TensorSpan(name, kind, tuple(value.shape), offset))
            offset = spans[-1].end
        return cls(tuple(spans))

    def as_json(self) -> list[list[Any]]:
        return [
            [one.name, str(one.dtype).removeprefix("torch."), list(one.shape), one.offset]
            for one in self.spans
        ]

    @classmethod
    def from_json(cls, table: Sequence[Sequence[Any]]) -> MemoryLayout:
        spans = (
            TensorSpan(name, _dtype(kind), tuple(shape), at) for name, kind, shape, at in table
        )
        return cls(tuple(spans))

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors in `memory` (uint8, one dimension): views, no copies.

        Raises ValueError when the table reaches beyond the memory.
        """
        end = max((one.offset + one.num_bytes for one in self.spans), default=0)
        if end > memory.numel():
            raise ValueError(f"weights need {end} bytes, the memory has {memory.numel()}")
        return {
            one.name: memory[one.offset : one.offset + one.num_bytes]
            .view(one.dtype)
            .view(one.shape)
            for one in self.spans
        }

    def write(self, weights: Weights, memory: Tensor) -> None:
        """Copy the weights to where they belong; to another dtype and device where asked to."""
        copy_weights(self.views(memory), weights)

    @torch.no_grad()
    def pieces(self, weights: Weights, buffer: Tensor) -> Iterator[Tensor]:
        """The same memory one piece after the other, each in this buffer (uint8, a multiple of 64
        bytes), which is written again for the next.
        """
        size = buffer.numel()
        for begin in range(0, self.num_bytes, size):
            end = min(begin + size, self.num_bytes)
            for one in self.spans:
                first, last = max(one.offset, begin), min(one.offset + one.num_bytes, end)
                if first < last:
                    item = one.dtype.itemsize
                    flat = weights[one.name].reshape(-1)
                    part = flat[(first - one.offset) // item : (last - one.offset) // item]
                    buffer[first - begin : last - begin].view(one.dtype).copy_(part)
            yield buffer[: end - begin]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found
