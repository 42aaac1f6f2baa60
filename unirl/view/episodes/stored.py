"""Episodes of a trajectory store, read while a run may be writing it: each question is a short read
of its own, which holds nobody up.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.trajectories import frames
from unirl.llm.trajectories.config import FILE
from unirl.llm.trajectories.databases.database import BodyDropped
from unirl.llm.trajectories.databases.schema import VERSION
from unirl.llm.trajectories.databases.sqlite import SqliteDatabase
from unirl.llm.trajectories.record import Record
from unirl.llm.trajectories.store import TrajectoryStore
from unirl.view.answers import cut
from unirl.view.episodes.index import NUMBERS, WORDS, EpisodeIndex
from unirl.view.episodes.wanted import Wanted
from unirl.view.files import is_inside, signature
from unirl.view.folders import NotThere

COLUMNS = (
    "id", "ticket", "place", "group_size", "task", "task_id", "split", "state", "ending", "why",
    "reward", "outcome", "version_min", "version_max", "trained_version", "turns", "segments",
    "drawn", "tokens", "seconds", "seconds_model", "seconds_tools", "agent", "created",
)  # fmt: skip
_INDEXED = f"id, {', '.join((*WORDS, *NUMBERS))}"
_AGAIN_SECONDS = 60.0
"""After which the index is read again while a run writes: states change, and episodes expire. New
ones are in it at once.
"""
_SEARCH_SECONDS = 0.15
"""For texts of bodies."""
_AT_ONCE = 500


class Stored:
    """The store of one run. Raises UniRLError where it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FILE
        self._lock = threading.Lock()
        self._store: TrajectoryStore | None = None
        self._opened: tuple[bool, tuple[int, ...]] = False, ()
        self._index, self._indexed = EpisodeIndex(), float("-inf")

    @property
    def is_there(self) -> bool:
        return self._path.is_file() and is_inside(self._path, self._folder)

    def find(self, wanted: Wanted) -> dict[str, Any]:
        with self._lock:
            store = self._open()
            self._catch_up(store)
            found = self._index.find(wanted)
            more: dict[str, Any] = {"source": "store"}
            if wanted.text:
                num_found = len(found)
                found, searched = _search(store, found, wanted)
                more |= {"searched": searched, "unsearched": num_found - searched}
            end = wanted.after + wanted.limit
            return {
                "total": len(found),
                "rows": _rows(store, found[wanted.after : end]),
                "next": str(end) if end < len(found) else None,
                "facets": self._index.facets(),
                **more,
            }

    def of_ticket(self, ticket: int) -> list[dict[str, Any]]:
        """The episodes of a group, by their place."""
        with self._lock:
            rows = self._open().database.execute(
                f"SELECT {', '.join(COLUMNS)} FROM episode WHERE ticket = ? ORDER BY place, id "
                "LIMIT 1000",
                [ticket],
            )
        return [_row(row) for row in rows]

    def row(self, ep: int) -> dict[str, Any]:
        with self._lock:
            sql = f"SELECT {', '.join(COLUMNS)}, scores FROM episode WHERE id = ?"
            rows = self._open().database.execute(sql, [ep])
        if not rows:
            raise NotThere(
                f"there is no episode {ep}", "it has a number of the list", "it may have expired"
            )
        return {**_row(rows[0]), "rewards": _scores(rows[0][-1])}

    def record(self, ep: int) -> Record:
        """The whole episode. Raises BodyDropped where its line alone is left."""
        with self._lock:
            store = self._open()
            sql = "SELECT body_key FROM episode WHERE id = ?"
            found = store.database.execute(sql, [ep])
            if found and found[0][0] is not None:
                raise BodyDropped(
                    f"tokens and texts of episode {ep} are in a bucket",
                    "unirl view reads run folders alone",
                    "unirl trajectories RUN --episode shows it",
                )
            return store.get(ep)

    def _open(self) -> TrajectoryStore:
        if not self.is_there:
            raise NotThere("this run has no stored episodes", f"they are in {FILE}", "")
        has_log = self._path.with_name(f"{FILE}-wal").exists()
        # Of a file that nobody writes SQLite looks at nothing twice.
        now = has_log, signature(self._path)[: 2 if has_log else 4]
        if self._store is None or now != self._opened:
            self.close()
            store = TrajectoryStore(SqliteDatabase(self._path, read_only=True), redact=False)
            sql = "SELECT value FROM meta WHERE name = 'schema'"
            known = store.database.execute(sql)
            if not known or known[0][0] != str(VERSION):
                store.close()
                raise UniRLError(
                    "the episodes were written by another version of UniRL",
                    f"their tables are of version {known[0][0] if known else '?'}, this one reads "
                    f"{VERSION}",
                    "use the version that wrote them",
                )
            store.database.execute("PRAGMA cache_size = -16000")
            self._store, self._opened = store, now
            self._index, self._indexed = EpisodeIndex(), float("-inf")
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _catch_up(self, store: TrajectoryStore) -> None:
        is_written = self._opened[0]
        is_old = time.monotonic() - self._indexed > _AGAIN_SECONDS
        if is_old and (is_written or not len(self._index)):
            self._index, self._indexed = EpisodeIndex(), time.monotonic()
        while True:
            rows = store.database.execute(
                f"SELECT {_INDEXED} FROM episode WHERE id > ? AND state <> 'open' ORDER BY id "
                "LIMIT 20000",
                [self._index.last_id],
            )
            self._index.add(rows)
            if len(rows) < 20000:
                return


def _rows(store: TrajectoryStore, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Their rows, in this order."""
    marks = ", ".join("?" * len(ids))
    sql = f"SELECT {', '.join(COLUMNS)} FROM episode WHERE id IN ({marks})"
    found = {row[0]: _row(row) for row in store.database.execute(sql, ids)}
    return [found[id] for id in ids if id in found]


def _search(store: TrajectoryStore, ids: Sequence[int], wanted: Wanted) -> tuple[list[int], int]:
    """Those that have the text, and how many were looked at in the time that there is."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    found: list[int] = []
    for begin in range(0, len(ids), _AT_ONCE):
        some = ids[begin : begin + _AT_ONCE]
        rows = {row["id"]: row for row in _rows(store, some)}
        marks = ", ".join("?" * len(some))
        sql = f"SELECT ep, data FROM body WHERE ep IN ({marks})"
        bodies = {ep: data for ep, data in store.database.execute(sql, some)}
        for number, id in enumerate(some):
            if time.monotonic() > deadline:
                return found, begin + number
            if id in rows and _has(rows[id], bodies.get(id, b""), wanted.text):
                found.append(id)
    return found, len(ids)


def _has(row: Mapping[str, Any], body: bytes, text: str) -> bool:
    needle = text.lower()
    if any(needle in str(row[name] or "").lower() for name in ("task", "task_id", "why", "agent")):
        return True
    if not body:
        return False
    # As JSON spells it: other letters than those of ASCII are escaped in a body.
    escaped = json.dumps(needle, ensure_ascii=False)[1:-1]
    try:
        texts = frames.plain_texts(body)
        if not needle.isascii():
            texts = [json.dumps(json.loads(each), ensure_ascii=False) for each in texts]
        return any(escaped in each.lower() for each in texts)
    except (ValueError, IndexError):
        return False  # it is torn; its row is shown all the same


def _row(values: Sequence[Any]) -> dict[str, Any]:
    row = dict(zip(COLUMNS, values, strict=False))
    return {
        name: cut(value, 500) if isinstance(value, str) else value for name, value in row.items()
    }


def _scores(text: object) -> dict[str, Any]:
    """By the reward's name: its value, or why it has none."""
    try:
        found = json.loads(str(text))
        return {
            cut(str(name), 100): value if outcome == 0 else f"no value: {cut(str(why), 500)}"
            for name, (value, outcome, why) in found.items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}
