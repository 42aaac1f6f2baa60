"""What came out of a sweep: a table, results.csv, results.json, and the best config."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.config.writing import value_to_toml
from unirl.storage import disk
from unirl.sweep.config import SweepConfig
from unirl.sweep.ranking import standing
from unirl.sweep.record import Record
from unirl.sweep.runs import config_path
from unirl.sweep.trial import Trial


def rows(record: Record, config: SweepConfig, rungs: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each trial, the best first; values are None where there are none."""
    found = []
    for trial in standing(record.trials, config.objective):
        reached = trial.reached()
        has_value = reached > 0 and trial.status != "failed"
        std = trial.std(reached - 1) if has_value else math.nan
        found.append(
            {
                "trial": trial.number,
                **trial.settings,
                "mean": trial.mean(reached - 1) if has_value else None,
                "std": None if math.isnan(std) else std,
                "seeds": len(trial.runs),
                "rung": rungs[reached - 1] if reached else None,
                "steps": sum(run.steps for run in trial.runs),
                "status": trial.status,
                "reason": trial.reason,
            }
        )
    return found


def table(
    found: list[dict[str, Any]], config: SweepConfig, settings: list[str]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for people."""
    columns = ["trial", *settings, config.objective.metric, "seeds", "rung", "status", ""]
    lines = []
    for row in found:
        mean = "-" if row["mean"] is None else f"{row['mean']:.4g}"
        spread = "" if row["std"] is None else f" +- {row['std']:.2g}"
        rung = "-" if row["rung"] is None else f"{row['rung']:,}"
        values = [value_to_toml(row[key]) for key in settings]
        cells = [mean + spread, str(row["seeds"]), rung, row["status"], row["reason"]]
        lines.append([str(row["trial"]), *values, *cells])
    return columns, lines


def best(record: Record, config: SweepConfig) -> Trial | None:
    """The best trial that has a value."""
    first = standing(record.trials, config.objective)[:1]
    usable = [trial for trial in first if trial.reached() and trial.status != "failed"]
    return usable[0] if usable else None


def write(folder: Path, record: Record, config: SweepConfig, rungs: tuple[int, ...]) -> Path | None:
    """All files of results; returns that of the best config, if there is one."""
    found = rows(record, config, rungs)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]) if found else [])
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in found)
    disk.replace_text(folder / "results.csv", text.getvalue())
    document = {
        "objective": {"metric": config.objective.metric, "mode": config.objective.mode},
        "rungs": rungs,
        "seeds": config.seeds,
        "trials": found,
    }
    disk.replace_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
    trial = best(record, config)
    if trial is None:
        return None
    path = folder / "best.toml"
    row = found[0]
    spread = "" if row["std"] is None else f" +- {row['std']:.2g}"
    comment = (
        f"# {trial.name} of {folder.name}: {config.objective.metric} {row['mean']:.4g}{spread} "
        f"over {row['seeds']} seed(s) at {row['rung']:,} steps\n"
    )
    config_text = config_path(folder, trial).read_text(encoding="utf-8")
    disk.replace_text(path, comment + config_text)
    return path


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, Mapping | list | tuple) else value
