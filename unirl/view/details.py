"""One run as a whole: its settings, its pipeline as it is now, evaluations and what else is in its
folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unirl.report.console import waiting_share
from unirl.run_events import NAME as EVENTS
from unirl.view.answers import cut
from unirl.view.files import is_inside, last_rows, text_of
from unirl.view.folders import Run
from unirl.view.rows import Array, number
from unirl.view.summary import Summary

_MOST = 2000
"""Files of a folder that are listed."""
VIDEOS = {".mp4": "video/mp4", ".gif": "image/gif", ".webm": "video/webm"}
"""What a browser gets to know of each kind."""
_SETTING = 4000
"""Characters of a setting."""


def details(run: Run, owner: Run, summary: Summary) -> dict[str, Any]:
    """owner: the run whose config and events these are; another one of a further policy alone."""
    events = last_rows(owner.path, EVENTS, _MOST)
    films = videos(owner)
    return {
        **summary.row,
        "config": flat(summary.config),
        "command": cut(text_of(owner.path, "command.txt").strip(), _SETTING) or None,
        "pipeline": pipeline(run, summary, events),
        "evaluations": evaluations(run),
        "videos": [{"name": name, "bytes": size} for name, size in films.items()],
        "checkpoints": sorted(
            name for name in names_in(run.path, "checkpoints") if name.startswith("step_")
        ),
        "has": {"videos": bool(films)},
    }


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = cut(f"{prefix}{name}", 200)
        if isinstance(value, dict) and value:
            found |= flat(value, f"{key}.")
        elif isinstance(value, bool | int | float):
            found[key] = value
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            found[key] = cut(text, _SETTING)
    return found


def compared(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All settings of some runs, side by side."""
    tables = [flat(config) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        values = [table.get(key) for table in tables]
        texts = {json.dumps(value, default=str) for value in values}
        rows.append({"key": key, "values": values, "differs": len(texts) > 1})
    return rows


def pipeline(run: Run, summary: Summary, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """pools -> queue -> learner -> weights, with what is known of each. Numbers are those of the
    newest row.
    """
    last, plan, members = summary.last, _plan(events), _members(events)
    pools = plan.get("pools")
    pools = [each for each in pools if isinstance(each, Mapping)] if isinstance(pools, list) else []
    index = int(run.path.name) if run.part_of else 0
    queues = plan.get("queues")
    queue = queues[index] if isinstance(queues, list) and index < len(queues) else {}
    queue = queue if isinstance(queue, Mapping) else {}
    sizes = _sizes(events)
    runs_inline = plan.get("runner") == "inline"
    is_alive = summary.row["state"] == "training"
    return {
        "runner": plan.get("runner"),
        "pools": [
            {
                "name": name,
                "members": pool.get("members") if runs_inline else members.get(name, 0),
                "wanted": sizes.get(name, pool.get("members")),
                "most": pool.get("most"),
                "helpers": pool.get("helpers"),
                "share": pool.get("share"),
                "learned": last.get(f"queue/learned/{name}"),
            }
            for name, pool in ((str(pool.get("name", "")), pool) for pool in pools)
        ],
        "actors": {
            "rate": last.get("perf/produced_sps"),
            "wait": waiting_share("actor", last),
        },
        "queue": {
            "slots": queue.get("slots"),
            "batch_size": queue.get("batch_size"),
            "max_staleness": queue.get("max_staleness"),
            "window": queue.get("window"),
            "ready": last.get("queue/ready"),
            "running": last.get("queue/running"),
            "discarded": {
                name.removeprefix("queue/discarded/"): value
                for name, value in last.items()
                if name.startswith("queue/discarded/")
            },
            "staleness": last.get("staleness/mean"),
        },
        "learner": {
            "name": queue.get("learner"),
            "rate": last.get("perf/sps"),
            "updates_per_second": last.get("perf/updates_per_second"),
            "wait": waiting_share("learner", last),
        },
        "weights": {"version": last.get("charts/updates")},
        "limit": summary.row["limit"],
        "is_alive": is_alive,
    }


def _plan(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    kinds = ("started", "resumed")
    found = (each for each in reversed(events)
             if each.get("member") == "run" and each.get("event") in kinds)  # fmt: skip
    return next(found, {})


def _members(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many of each pool live, by what started and ended since the run began."""
    alive: set[str] = set()
    for each in events:
        member, kind = str(each.get("member", "")), each.get("event")
        if member == "run":
            alive = set() if kind in ("started", "resumed", "restarted") else alive
        elif kind in ("started", "restarted"):
            alive.add(member)
        elif kind in ("died", "left"):
            alive.discard(member)
    found: dict[str, int] = {}
    for member in alive:
        pool = member.rpartition(" ")[0]
        found[pool] = found.get(pool, 0) + 1
    return found


def _sizes(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        str(each.get("pool")): each.get("size") for each in events if each.get("event") == "scaled"
    }


def evaluations(run: Run) -> list[dict[str, Any]]:
    """By step: those of the training, and those by hand."""
    found = []
    for folder in ("eval", "eval/by_hand"):
        for name in sorted(names_in(run.path, folder)):
            if name.endswith(".json"):
                with contextlib.suppress(ValueError, RecursionError):
                    table = json.loads(text_of(run.path, f"{folder}/{name}"))
                    table = table if isinstance(table, dict) else {}
                    plain = {key: value for key, value in table.items()
                             if isinstance(value, bool | int | float)}  # fmt: skip
                    changes = table.get("changes")
                    changed = flat(changes) if isinstance(changes, dict) else {}
                    found.append(
                        {**plain, "by_hand": folder != "eval", "file": name, "changes": changed}
                    )
    return sorted(found, key=lambda each: number(each.get("step", 0)))


def videos(run: Run) -> dict[str, int]:
    """Names of its videos, with their bytes."""
    found = {}
    for name in sorted(names_in(run.path, "videos")):
        path = run.path / "videos" / name
        if path.suffix.lower() in VIDEOS and is_inside(path, run.path):
            with contextlib.suppress(OSError):
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    found[name] = about.st_size
    return found


def names_in(folder: Path, below: str) -> Iterator[str]:
    """Names in a folder of a run's, that are text."""
    where = folder / below
    with contextlib.suppress(OSError):
        if not is_inside(where, folder):
            return
        for number, entry in enumerate(os.scandir(where)):
            if number == _MOST:
                return
            if entry.name.isprintable() and not entry.name.startswith("."):
                yield entry.name


def events_of(owner: Run, columns: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Its events, with the `seconds` and the `step` of the run at which they happened, as far as
    its rows say: they count no time between a stop and a resume.
    """
    rows = last_rows(owner.path, EVENTS, 5 * _MOST)
    steps, seconds = columns["step"], columns["seconds"]
    began: tuple[float, float] | None = None
    found = []
    for row in rows:
        at = number(row.get("time"))
        if row.get("member") == "run" and row.get("event") in ("started", "resumed"):
            # What was learned before continues where the last row was that was kept.
            kept = int(np.searchsorted(steps, number(row.get("step")), "right"))
            earlier = row["event"] == "resumed" and kept > 0
            began = at, float(seconds[kept - 1]) if earlier else 0.0
        texts = {key: cut(value, _SETTING) if isinstance(value, str) else value
                 for key, value in row.items() if not isinstance(value, list | dict)}  # fmt: skip
        passed = began[1] + at - began[0] if began is not None else math.nan
        if math.isfinite(passed):
            texts["seconds"] = round(passed, 3)
            if "step" not in texts and len(steps):
                texts["step"] = float(np.interp(passed, seconds, steps))
        found.append(texts)
    return found
