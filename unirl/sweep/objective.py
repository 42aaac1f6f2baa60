"""The objective of a run, from its metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError, suggestion
from unirl.sweep.config import ObjectiveConfig


def measure(folder: Path, objective: ObjectiveConfig) -> float | None:
    """The objective as of the run's newest rows; None where no row has it as a number."""
    rows = list(_rows(folder / "metrics.jsonl"))
    found = [
        (row["step"], value)
        for row in rows
        if isinstance(value := row.get(objective.metric), int | float) and math.isfinite(value)
    ]
    if not found:
        return None
    if not objective.window_steps:
        return float(found[-1][1])
    begin = rows[-1]["step"] - objective.window_steps
    values = [value for step, value in found if step > begin] or [found[-1][1]]
    return math.fsum(values) / len(values)


def unknown_objective(folder: Path, objective: ObjectiveConfig) -> UniRLError:
    """The error where no run has written the objective."""
    names = sorted({name for row in _rows(folder / "metrics.jsonl") for name in row})
    near = suggestion(objective.metric, names)
    return UniRLError(
        f'objective.metric is "{objective.metric}", and {folder} has written no such number',
        f"its metrics.jsonl has {', '.join(names) or 'no rows'}",
        f"{near} correct it, and start again with --overwrite"
        if near
        else "name one of these, or train longer, and start again with --overwrite",
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                if isinstance(row := json.loads(line), dict) and "step" in row:
                    yield row
