"""Sweeps: folders of runs with a `sweep.json`, of which each trial is a row.

The file is read as it is, whatever version wrote it: what is missing is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.view.answers import cut
from unirl.view.files import opened
from unirl.view.folders import Folders, NotThere, Run

NAME = "sweep.json"
_MAX_BYTES, _MAX_TRIALS = 64 << 20, 10_000


class Sweeps:
    """Of all runs below the view's folders."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def all(self) -> list[dict[str, Any]]:
        """What the list shows of each."""
        rows: list[dict[str, Any]] = []
        for id, (folder, name, _) in self._found().items():
            try:
                table = _read(folder)
            except UniRLError as error:
                rows.append({"id": id, "name": name, "error": [*error.parts]})
                continue
            trials = [_trial(each, ()) for each in _trials(table)]
            best = _best(trials, _mode(table))
            rows.append(
                {
                    "id": id,
                    "name": name,
                    **_objective(table),
                    "seconds": table.get("seconds"),
                    "trials": len(trials),
                    "statuses": _counts(trials),
                    "best": None if best is None else best["mean"],
                }
            )
        return rows

    def one(self, id: str) -> dict[str, Any]:
        """All of its trials, the best first. UniRLError where it cannot be read."""
        if id not in (found := self._found()):
            raise NotThere(
                f"there is no sweep with the id {id[:40]!r}",
                "ids are those of GET /api/sweeps",
                "load the list again: the folder may have been moved or deleted",
            )
        folder, name, runs = found[id]
        table = _read(folder)
        trials = [_trial(each, runs) for each in _trials(table)]
        sign = -1.0 if _mode(table) == "max" else 1.0
        trials.sort(
            key=lambda each: (
                each["status"] == "failed",
                -each["rung"],
                math.inf if each["mean"] is None else sign * each["mean"],
                each["trial"],
            )
        )
        settings = dict.fromkeys(key for each in trials for key in each["settings"])
        return {
            "id": id,
            "name": name,
            **_objective(table),
            "seconds": table.get("seconds"),
            "settings": [*settings],
            "trials": trials,
        }

    def _found(self) -> dict[str, tuple[Path, str, list[Run]]]:
        found: dict[Path, list[Run]] = {}
        for run in self._folders.runs().values():
            if run.part_of is None:
                found.setdefault(run.path.parent, []).append(run)
        sweeps = {}
        for folder, runs in sorted(found.items()):
            if (folder / NAME).is_file():
                id = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
                name = cut(folder.name.encode("utf-8", "replace").decode(), 200)
                sweeps[id] = (folder, name, runs)
        return sweeps


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        with opened(folder, NAME) as file:
            table = json.loads(file.read(_MAX_BYTES))
        if not isinstance(table, dict):
            raise ValueError("it is no table")
        return table
    except (OSError, ValueError, RecursionError) as error:
        raise UniRLError(
            f"{NAME} of {folder.name[:80]!r} cannot be read",
            f"unirl sweep writes it whole, and {error}"[:300],
            "look at its runs by themselves",
        ) from error


def _trials(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    trials = table.get("trials")
    found = trials if isinstance(trials, list) else []
    return [each for each in found[:_MAX_TRIALS] if isinstance(each, dict)]


def _objective(table: Mapping[str, Any]) -> dict[str, Any]:
    asked = table.get("asked")
    objective = asked.get("objective") if isinstance(asked, dict) else None
    metric = objective.get("metric") if isinstance(objective, dict) else None
    return {"metric": cut(str(metric), 200) if metric else None, "mode": _mode(table)}


def _mode(table: Mapping[str, Any]) -> str:
    asked = table.get("asked")
    objective = asked.get("objective") if isinstance(asked, dict) else None
    return "min" if isinstance(objective, dict) and objective.get("mode") == "min" else "max"


def _trial(table: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    own = [each for each in table.get("runs") or () if isinstance(each, dict)]
    values = [[v for v in each.get("values") or () if isinstance(v, int | float)] for each in own]
    rung = min(map(len, values), default=0)
    last = [each[rung - 1] for each in values] if rung else []
    number, settings = table.get("number"), table.get("settings")
    prefix = f"trial-{number:03d}-seed-" if isinstance(number, int) else "?"
    return {
        "trial": number if isinstance(number, int) else -1,
        "settings": settings if isinstance(settings, dict) else {},
        "mean": statistics.fmean(last) if last else None,
        "std": statistics.stdev(last) if len(last) > 1 else None,
        "rung": rung,
        "steps": sum(each.get("steps") or 0 for each in own),
        "status": cut(str(table.get("status")), 40),
        "reason": cut(str(table.get("reason") or ""), 500),
        "runs": [
            {"id": run.id, "seed": run.path.name.removeprefix(prefix)[:20]}
            for run in runs
            if run.path.name.startswith(prefix)
        ],
    }


def _best(trials: Sequence[Mapping[str, Any]], mode: str) -> Mapping[str, Any] | None:
    usable = [each for each in trials if each["mean"] is not None and each["status"] != "failed"]
    top = max((each["rung"] for each in usable), default=0)
    sign = 1.0 if mode == "max" else -1.0
    highest = [each for each in usable if each["rung"] == top]
    return max(highest, key=lambda each: sign * each["mean"], default=None)


def _counts(trials: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in trials:
        counts[each["status"]] = counts.get(each["status"], 0) + 1
    return counts
