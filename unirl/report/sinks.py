"""metrics.jsonl: the scalars of a run, which everything else reads."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.storage import disk


class JsonlSink:
    """metrics.jsonl: a line per row, {"step": ..., "seconds": ..., name: value}; NaN becomes null.

    `seconds` counts from the start of the run, without the time between a stop and a resume.
    resume_step: rows after this step are cut off, as the resumed run writes them again. None: the
    run is new; UniRLError when the file exists.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        path = Path(path)
        seconds = 0.0
        if resume_step is not None:
            seconds = _cut(path, resume_step)
        elif path.exists():
            raise UniRLError(
                f"{path} exists",
                "a new run does not write into the metrics of another",
                f"resume it (unirl resume {path.parent}) or give the new run another name",
            )
        self._path = path
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._start = time.monotonic() - seconds

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one row, complete on disk for other readers when this returns."""
        row: dict[str, Any] = {"step": step, "seconds": round(time.monotonic() - self._start, 3)}
        row |= {name: v if math.isfinite(v) else None for name, v in scalars.items()}
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise unwritable(self._path, self._path.parent, error) from error

    def close(self) -> None:
        """Close the file; each row is on disk already, or `write` has said why not."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, in order; a last line torn by a kill is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        raise no_run(run_dir, path) from None
    rows = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UniRLError(
                f"line {number} of {path} is damaged",
                'each line must be a JSON object with "step" and "seconds"',
                "delete that line",
            )
    return rows


def no_run(folder: Path, missing: Path) -> UniRLError:
    return UniRLError(
        f"{folder} is not a run folder",
        f"{missing} must be there, and is not",
        "name a folder that unirl train wrote, such as runs/NAME",
    )


def unwritable(path: Path, run_dir: Path, error: OSError) -> UniRLError:
    """A file of a run folder that could not be written."""
    full = "disk full: " if disk.is_full(error) else ""
    return UniRLError(
        f"{full}{path} could not be written: {error.strerror or error}",
        "the run folder must stay writable during training",
        f"free some space, then: unirl resume {run_dir}",
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict) and {"step", "seconds"} <= row.keys()
    return row if whole else None


def _cut(path: Path, step: int) -> float:
    """Drop all rows after `step`, written aside and renamed; returns the last one's seconds."""
    if not path.exists():
        return 0.0
    rows = [row for row in read_metrics(path.parent) if row["step"] <= step]
    disk.replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return float(rows[-1]["seconds"]) if rows else 0.0
