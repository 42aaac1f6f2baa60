"""Weights in shared memory between processes of one machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from unirl.core.weights import Loadable, Weights
from unirl.device import copy_weights
from unirl.errors import DeadlineExceeded
from unirl.transports.memory import ALIGN, SharedBlock, aligned_offsets

_PULL_SECONDS = 30.0


def weights_layout(example: Weights) -> tuple[dict[str, int], int]:
    """Where weights of these names, shapes and dtypes are in a buffer, and how long it is."""
    return aligned_offsets(
        {name: value.dtype.itemsize * value.numel() for name, value in example.items()}
    )


class SharedWeightStore:
    """The weight store between processes: two buffers, each with a sequence number that is odd
    while it is written.

    A reader copies the active buffer and looks at its sequence number again: unchanged means whole,
    else it copies again. The writer always writes the other buffer, so a reader is disturbed only
    if two versions are published during its copy.
    """

    lends = False
    _VERSION, _ACTIVE, _SEQUENCE, _VERSIONS, _NUM_CELLS = 0, 1, 2, 4, 6

    def __init__(self, example: Weights) -> None:
        self._shapes = {name: (tuple(value.shape), value.dtype) for name, value in example.items()}
        self._offsets, self._buffer_bytes = weights_layout(example)
        self._block = SharedBlock(ALIGN + 2 * self._buffer_bytes, "unirl-weights")
        self._attach()
        self.cells[self._VERSION] = -1

    def _attach(self) -> None:
        self.cells = memoryview(self._block.buffer)[: 8 * self._NUM_CELLS].cast("q")
        self._buffers: list[dict[str, torch.Tensor]] = [
            {
                name: self._block.tensor(
                    ALIGN + i * self._buffer_bytes + self._offsets[name], shape, dtype
                )
                for name, (shape, dtype) in self._shapes.items()
            }
            for i in range(2)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_shapes": self._shapes,
            "_offsets": self._offsets,
            "_buffer_bytes": self._buffer_bytes,
            "_block": self._block,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    @property
    def version(self) -> int:
        return int(self.cells[self._VERSION])

    def publish(self, weights: Weights, version: int) -> None:
        """See unirl.core.weights.WeightStore. One process publishes."""
        index = self._begin()
        copy_weights(self._buffers[index], weights)
        self._end(index, version)

    def receive(self, fill: Callable[[int, memoryview], int]) -> None:
        """As publish, of bytes in the order of `weights_layout`: `fill` gets one of two buffers,
        0 or 1, writes them there and returns their version. What it raises leaves the version as it
        is.
        """
        index = self._begin()
        start = ALIGN + index * self._buffer_bytes
        into = memoryview(self._block.buffer)[start : start + self._buffer_bytes]
        self._end(index, fill(index, into))

    @property
    def num_bytes(self) -> int:
        """Of one version."""
        return self._buffer_bytes

    def _begin(self) -> int:
        """The buffer to write to. Its sequence is odd: even after a write that was broken off."""
        cells, index = self.cells, 1 - self.cells[self._ACTIVE]
        cells[self._SEQUENCE + index] += 1 + cells[self._SEQUENCE + index] % 2
        return index

    def _end(self, index: int, version: int) -> None:
        cells = self.cells
        cells[self._VERSIONS + index] = version
        cells[self._SEQUENCE + index] += 1
        cells[self._ACTIVE] = index
        cells[self._VERSION] = version

    def pull(self, into: Loadable, have: int) -> int:
        """See unirl.core.weights.WeightStore. Raises DeadlineExceeded when no whole version can be
        read for 30 s.
        """
        cells, deadline = self.cells, time.monotonic() + _PULL_SECONDS
        if cells[self._VERSION] == have:
            return have
        while True:
            index = cells[self._ACTIVE]
            before = cells[self._SEQUENCE + index]
            version = int(cells[self._VERSIONS + index])
            if before % 2 == 0:
                into.load_weights(self._buffers[index])
                if cells[self._SEQUENCE + index] == before:
                    return version
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"no whole version of the weights could be read for {_PULL_SECONDS:g} s",
                    "a copy must be faster than two publications",
                    "publish less often",
                )
