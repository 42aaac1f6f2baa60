"""Numbers of a run over its steps or seconds, many points as few; how old its samples were."""

from __future__ import annotations

from typing import Any

import numpy as np

from unirl.view.columns import ColumnStore
from unirl.view.folders import Run
from unirl.view.rows import Array

PREFIX = "staleness/age/"
_BINS = 200
"""Of the histogram."""


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


def histogram(columns: ColumnStore, run: Run) -> dict[str, Any]:
    """Shares of each age, [bins][ages]; t: the step at which each bin ends. Nothing where a run of
    an older version has not recorded them.
    """
    ages = sorted(
        int(age)
        for name in columns.names(run)
        if name.startswith(PREFIX) and (age := name.removeprefix(PREFIX)).isdecimal()
    )
    found = columns.get(run, [f"{PREFIX}{age}" for age in ages])
    steps = found["step"]
    if not ages or not len(steps):
        return {"t": [], "ages": [], "share": [], "recorded": False}
    begins = np.unique(np.linspace(0, len(steps), min(_BINS, len(steps)), False, dtype=np.int64))
    counts = [
        np.add.reduceat(np.nan_to_num(found[f"{PREFIX}{age}"], posinf=0, neginf=0), begins)
        for age in ages
    ]
    table = np.stack(counts, axis=1)
    total = table.sum(axis=1, keepdims=True)
    share = np.divide(table, total, out=np.zeros_like(table), where=total > 0)
    ends = np.append(begins[1:], len(steps)) - 1
    return {
        "t": steps[ends].tolist(),
        "ages": ages,
        "share": np.round(share, 4).tolist(),
        "recorded": True,
    }
