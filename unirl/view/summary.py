"""A run in a row of the list: what it trains, how far it is and what limits it, from its config,
its last rows and its last events.
"""

from __future__ import annotations

import hashlib
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.report.console import limiting_rate
from unirl.report.plots import group_key
from unirl.run_events import NAME as EVENTS
from unirl.storage import run_lock
from unirl.view.answers import cut
from unirl.view.columns import NAME as METRICS
from unirl.view.files import last_rows, signature, text_of
from unirl.view.folders import Folders, Run
from unirl.view.rows import KEYS, number
from unirl.view.state import run_event, state_of

_LAST_ROWS, _LAST_EVENTS = 5, 200
RETURN, REWARD = "charts/episodic_return", "reward"
_AGAIN_SECONDS = 5.0
"""After which a run that trains is looked at again, though no file has changed."""
_FILES = ("config.toml", METRICS, EVENTS, run_lock.NAME, "failed.txt")


@dataclass(frozen=True)
class Summary:
    row: Mapping[str, Any]
    """What the list shows."""
    config: Mapping[str, Any]
    """The tables of config.toml, whatever version wrote it."""
    last: Mapping[str, float]
    """The newest numbers of the run."""


class Summaries:
    """Summaries of all runs, made again where a file of theirs has changed."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._known: dict[str, tuple[object, Summary]] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Mapping[str, Any]]:
        return [self.of(run).row for run in self._folders.runs().values()]

    def of(self, run: Run) -> Summary:
        signatures = tuple(signature(run.path / name) for name in _FILES)
        known = self._known.get(run.id)
        is_running = known is not None and known[1].row["state"] == "training"
        # A run that trains may end without a word.
        now = signatures, _clock() if is_running else 0
        if known is None or known[0] != now:
            summary = _summary(run, self._parent(run))
            is_running = summary.row["state"] == "training"
            with self._lock:
                self._known[run.id] = ((signatures, _clock() if is_running else 0), summary)
            return summary
        return known[1]

    def _parent(self, run: Run) -> Run:
        return self._folders.run(run.part_of) if run.part_of else run


def _clock() -> int:
    return int(time.monotonic() // _AGAIN_SECONDS)


def _summary(run: Run, owner: Run) -> Summary:
    """owner: whose folder has config and events; another one of a further policy alone."""
    config, error = read_config(owner)
    rows = last_rows(run.path, METRICS, _LAST_ROWS)
    last = newest(rows)
    events = last_rows(owner.path, EVENTS, _LAST_EVENTS)
    updated = max((at[3] / 1e9 for name in (METRICS, EVENTS)
                   if (at := signature((run if name == METRICS else owner).path / name))),
                  default=0.0)  # fmt: skip
    state = state_of(owner.path, events, updated)
    if not config and not rows:
        state = "training" if state == "training" else "unreadable"
        error = error or (f"{METRICS} has no rows", "it has one after the first update", "")
    table = _tables(config)
    name = next((each for each in (RETURN, REWARD) if each in last), None)
    began = run_event([each for each in events if each.get("event") in ("started", "resumed")])
    row = {
        "id": run.id,
        "name": cut(run.name, 200),
        "folder": str(run.path).encode("utf-8", "replace").decode(),
        "recipe": _text(config.get("recipe")),
        "group": _group(config, run),
        "seed": table("run").get("seed"),
        "state": state,
        "step": last.get("step"),
        "total_steps": table("run").get("total_steps"),
        "seconds": last.get("seconds"),
        "updated": updated or None,
        "started": began.get("time"),
        "result": None if name is None else last[name],
        "result_name": name,
        "evaluation": last.get("eval/return_mean"),
        "rate": last.get("perf/sps"),
        "version": last.get("charts/updates"),
        "env": _text(table("env").get("id") or table("sim").get("id")),
        "model": _text(table("model").get("path")),
        "task": _text(table("task").get("name")),
        "limit": limit_of(last),
        "part_of": run.part_of,
        "parts": list(run.parts),
    }
    if error:
        row["error"] = [*error]
    return Summary(row, config, last)


def read_config(run: Run) -> tuple[dict[str, Any], tuple[str, str, str] | None]:
    """config.toml as it is, and what is wrong with it. Keys that this version does not know are
    shown like others.
    """
    text = text_of(run.path, "config.toml")
    if not text:
        rule = "a run has written it when its training begins"
        return {}, ("config.toml cannot be read", rule, "look at log.txt in the run folder")
    try:
        return tomllib.loads(text), None
    except (ValueError, RecursionError) as error:
        return {}, ("config.toml is damaged", f"it must be TOML, but {error}", "restore it")


def newest(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The newest value of each name in some rows."""
    found: dict[str, float] = {}
    for row in rows:
        if all(number(row.get(key)) == number(row.get(key)) for key in KEYS):
            found |= {name: float(v) for name, v in row.items() if number(v) - number(v) == 0}
    return found


def limit_of(last: Mapping[str, float]) -> str | None:
    """actors, learner or rewards: which of them the others wait for; None: not known."""
    limit = limiting_rate(last)
    if limit is None:
        return None
    if limit == "consumption":
        return "learner"
    judging, writing = last.get("time/reward/mean", 0.0), last.get("time/generate/mean", 0.0)
    return "rewards" if judging > writing > 0 else "actors"


def _tables(config: Mapping[str, Any]) -> Any:
    def table(name: str) -> Mapping[str, Any]:
        found = config.get(name)
        return found if isinstance(found, dict) else {}

    return table


def _group(config: Mapping[str, Any], run: Run) -> str:
    """What runs have in common that differ in the seed alone."""
    if not config:
        return run.id
    part = run.path.name if run.part_of else ""
    return hashlib.blake2b((group_key(config) + part).encode(), digest_size=8).hexdigest()


def _text(value: object) -> str | None:
    return cut(value, 200) if isinstance(value, str) and value else None
