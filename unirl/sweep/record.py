"""`sweep.json`: what a sweep was asked for and how far it is, replaced whole at each change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.storage import disk
from unirl.sweep.trial import Trial

NAME = "sweep.json"
_FORMAT = 1
_FREE = ("on", "resources", "max_lost", "settings.ray")
"""What is remembered, and may be another when the sweep continues."""


@dataclass
class Record:
    """The sweep of a folder."""

    asked: dict[str, Any]
    """Settings that decide what is tried and how it is judged, by their keys."""
    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0
    """How long it ran, earlier sessions included."""

    def save(self, folder: Path) -> None:
        table = {
            "format": _FORMAT,
            "asked": self.asked,
            "seconds": round(self.seconds, 1),
            "trials": [trial.to_json() for trial in self.trials],
        }
        disk.replace_text(folder / NAME, json.dumps(table, indent=1) + "\n")


def load(folder: Path) -> Record | None:
    """The record in a folder; None where there is none. UniRLError where it cannot be read."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] == _FORMAT:
            trials = [Trial.from_json(trial) for trial in table["trials"]]
            return Record(table["asked"], trials, float(table["seconds"]))
        rule = f"it has format {table['format']}, and this version of UniRL writes {_FORMAT}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"{type(error).__name__}: {error}"
    raise UniRLError(
        f'"{path}" cannot be read', rule, "choose another --name, or start again with --overwrite"
    )


def check_same(record: Record, asked: Mapping[str, Any], folder: Path) -> None:
    """Raise UniRLError where the folder holds a sweep that was asked for something else."""
    had, wanted = _compared(record.asked), _compared(asked)
    for key in {**wanted, **had}:
        has, wants = had.get(key), wanted.get(key)
        if has != wants:
            raise UniRLError(
                f'"{folder}" holds another sweep',
                f"it has {key} = {json.dumps(has)}, this one {json.dumps(wants)}",
                "choose another --name, or start again with --overwrite",
            )


def _compared(asked: Mapping[str, Any]) -> dict[str, Any]:
    """By key, those of `settings` one by one: two sweeps differ in a table, or in a key of one."""
    rest = {key: value for key, value in asked.items() if key != "settings"}
    tables = {f"settings.{key}": value for key, value in asked["settings"].items()}
    return {key: value for key, value in {**rest, **tables}.items() if key not in _FREE}
