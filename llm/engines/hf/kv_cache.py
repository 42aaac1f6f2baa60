"""Keys and values of the sequences being generated: one row per sequence, no padding on the left,
rows without gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEP = 64
"""Positions are reserved in multiples of it."""


@dataclass(frozen=True)
class CacheShape:
    """What is stored of one token, per layer."""

    layers: int
    heads: int
    """Key/value heads, not query heads."""
    head_size: int


class KeyValueCache:
    """Memory [layers, 2, rows, heads, positions, head_size] that grows as needed; 0 is keys, 1 is
    values.

    Row r holds positions 0 .. length of its sequence; what follows is finite rubbish that masks
    hide, so fresh memory is zeroed (a masked NaN would still be NaN).
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._dtype, self._device = dtype, device
        self.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        shape = self.shape
        self.data = torch.zeros(
            (shape.layers, 2, 0, shape.heads, 0, shape.head_size),
            dtype=self._dtype,
            device=self._device,
        )
        self._base = torch.zeros((0, shape.heads), dtype=torch.int64, device=self._device)

    @property
    def rows(self) -> int:
        return self.data.shape[2]

    @property
    def positions(self) -> int:
        return self.data.shape[4]

    def to(self, device: torch.device) -> None:
        self._device = device
        self.data, self._base = self.data.to(device), self._base.to(device)

    def reserve(self, rows: int, positions: int, *, used_rows: int, used_positions: int) -> None:
        """Make room for so many; what the used ones hold is kept. Grows by half at least, so that
        copying costs a constant amount per token.
        """
        if rows <= self.rows and positions <= self.positions:
            return
        old = self.data
        if rows > self.rows:
            rows = max(rows, self.rows * 3 // 2)
        if positions > self.positions:
            positions = max(positions, self.positions * 3 // 2)
            positions = -(-positions // _STEP) * _STEP
        rows, positions = max(rows, self.rows), max(positions, self.positions)
        self.data = old.new_zeros((*old.shape[:2], rows, old.shape[3], positions, old.shape[5]))
        kept = (slice(None), slice(None), slice(used_rows), slice(None), slice(used_positions))
        self.data[kept] = old[kept]
        every = torch.arange(rows * self.shape.heads, device=self._device)
        self._base = every.view(rows, self.shape.heads) * positions

    def fill(self, layer: int, first: int, source: Tensor, key: Tensor, value: Tensor) -> None:
        """Rows first, first + 1, ... begin with the keys and values of the prompts that `source`
        [new] names: key, value [U, heads, P, head_size].
        """
        here = self.data[layer, :, first : first + len(source), :, : key.shape[2]]
        here[0] = key.index_select(0, source)
        here[1] = value.index_select(0, source)

    def next_cells(self, length: Tensor) -> Tensor:
        """Where the next token of rows 0 .. n-1 goes, for `append`: length [n] -> [n * heads]."""
        return (self._base[: len(length)] + length[:, None]).view(-1)

    def cells_at(self, row: Tensor, position: Tensor) -> Tensor:
        """Where tokens go, for `append`: row, position [n] -> [n * heads]."""
        return (self._base.index_select(0, row) + position[:, None]).view(-1)

    def append(self, layer: int, cells: Tensor, key: Tensor, value: Tensor) -> None:
        """One token for each `heads` of these cells: key, value [n * heads, head_size]."""
        flat = self.data[layer].view(2, -1, self.shape.head_size)
        flat[0].index_copy_(0, cells, key)
        flat[1].index_copy_(0, cells, value)

    def bytes_of(self, length: int) -> int:
        """That so many tokens of one row take."""
        shape = self.shape
        numbers = shape.layers * 2 * shape.heads * length * shape.head_size
        return numbers * self.data.element_size()

    def copy_of(self, row: int, length: int) -> Tensor:
        """What a row holds: [layers, 2, heads, length, head_size]."""
        return self.data[:, :, row, :, :length].clone()

    def put(self, row: int, beginning: Tensor) -> None:
        """A row begins with this: [layers, 2, heads, n, head_size]."""
        self.data[:, :, row, :, : beginning.shape[3]] = beginning

    def move(self, sources: list[int], targets: list[int], positions: int) -> None:
        """Copy whole rows over others, up to this position: how gaps are closed."""
        if not sources:
            return
        used = self.data[:, :, :, :, :positions]
        if len(sources) == 1:
            used[:, :, targets[0]] = used[:, :, sources[0]]
            return
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        used.index_copy_(2, target, used.index_select(2, source))
