"""How old the samples were that a run learned from: a histogram over its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from unirl.view.columns import ColumnStore
from unirl.view.folders import Run

PREFIX = "staleness/age/"
_BINS = 200


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
