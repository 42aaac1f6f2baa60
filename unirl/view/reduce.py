"""Many points as few: bins of rows that keep their mean and their extremes."""

from __future__ import annotations

from typing import Any

import numpy as np

from unirl.view.rows import Array


def reduced(x: Array, values: Array, points: int) -> dict[str, list[Any]]:
    """At most `points` bins of as many rows each: where each ends (t), mean (v), least and largest
    value (low, high). None where a bin has no value.
    """
    size = len(x)
    if size == 0:
        return {"t": [], "v": [], "low": [], "high": []}
    begins = np.unique(np.linspace(0, size, min(points, size), endpoint=False, dtype=np.int64))
    ends = np.append(begins[1:], size) - 1
    is_known = np.isfinite(values)
    known = np.where(is_known, values, 0.0)
    counts = np.add.reduceat(is_known.astype(np.int64), begins)
    sums = np.add.reduceat(known, begins)
    low = np.minimum.reduceat(np.where(is_known, values, np.inf), begins)
    high = np.maximum.reduceat(np.where(is_known, values, -np.inf), begins)
    mean = sums / np.maximum(counts, 1)
    gaps = counts == 0
    return {
        "t": _plain(x[ends]),
        **{name: _plain(np.where(gaps, np.nan, column))
           for name, column in (("v", mean), ("low", low), ("high", high))},
    }  # fmt: skip


def between(x: Array, begin: float | None, end: float | None) -> slice:
    """The rows from `begin` to `end` of an axis that never falls."""
    first = 0 if begin is None else int(np.searchsorted(x, begin, "left"))
    last = len(x) if end is None else int(np.searchsorted(x, end, "right"))
    return slice(first, last)


def _plain(column: Array) -> list[float | None]:
    """Numbers of JSON, of which there are no others than finite ones."""
    return [value if value - value == 0 else None for value in column.tolist()]
