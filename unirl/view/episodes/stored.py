"""Episodes of a trajectory store, read while a run may be writing it: each question is a short read
of its own, which holds nobody up.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.trajectories import frames
from unirl.llm.trajectories.databases.database import Row, StoreFailed
from unirl.llm.trajectories.record import Record
from unirl.llm.trajectories.store import TrajectoryStore
from unirl.view.answers import cut
from unirl.view.episodes.index import NUMBERS, WORDS, EpisodeIndex
from unirl.view.episodes.sources import Source
from unirl.view.episodes.wanted import Wanted
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
_AT_ONCE = 100
_TOGETHER = 20_000
"""Rows of the index that are read at a time."""


class Stored:
    """The stored episodes of one run. Raises UniRLError where they cannot be read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._opened: tuple[TrajectoryStore, str] | None = None
        self._forget()

    def _forget(self) -> None:
        self._index, self._indexed = EpisodeIndex(), time.monotonic()

    @property
    def is_there(self) -> bool:
        return self._source.is_there

    def find(self, wanted: Wanted) -> dict[str, Any]:
        with self._lock:
            store = self._open()[0]
            self._catch_up()
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
        return [_row(row) for row in self._select(
            ", ".join(COLUMNS), "ticket = ? ORDER BY place, id LIMIT 1000", ticket
        )]  # fmt: skip

    def row(self, ep: int) -> dict[str, Any]:
        rows = self._select(f"{', '.join(COLUMNS)}, scores", "id = ?", ep)
        if not rows:
            raise NotThere(
                f"there is no episode {ep}", "it has a number of the list", "it may have expired"
            )
        return {**_row(rows[0]), "rewards": _scores(rows[0][-1])}

    def record(self, ep: int) -> Record:
        """The whole episode. Raises BodyDropped where its line alone is left."""
        self.row(ep)  # it is this run's
        with self._lock:
            return self._open()[0].get(ep)

    def _select(self, columns: str, condition: str, value: int) -> list[Row]:
        with self._lock:
            store, own = self._open()
            sql = f"SELECT {columns} FROM episode WHERE {own} AND {condition}"
            return store.database.execute(sql, [value])

    def _open(self) -> tuple[TrajectoryStore, str]:
        opened = self._source.open()
        if opened != self._opened:
            self._opened = opened
            self._forget()
        return opened

    def _catch_up(self) -> None:
        if len(self._index) and time.monotonic() - self._indexed > _AGAIN_SECONDS:
            self._indexed = time.monotonic()
            if self._source.is_written:
                threading.Thread(target=self._read_again, daemon=True).start()
        while _read_more(self._index, *self._open()) == _TOGETHER:
            pass

    def _read_again(self) -> None:
        """Beside questions, which wait for a part of it at most."""
        index, opened = EpisodeIndex(), self._opened
        while opened is not None:
            time.sleep(0.01)  # a question that waits is first
            with self._lock, contextlib.suppress(UniRLError):  # the next question shows it
                if opened == self._opened and _read_more(index, *opened) == _TOGETHER:
                    continue
                if opened == self._opened:
                    self._index = index
            return


def _read_more(index: EpisodeIndex, store: TrajectoryStore, own: str) -> int:
    rows = store.database.execute(
        f"SELECT {_INDEXED} FROM episode WHERE {own} AND id > ? AND state <> 'open' "
        f"ORDER BY id LIMIT {_TOGETHER}",
        [index.last_id],
    )
    index.add(rows)
    return len(rows)


def _rows(store: TrajectoryStore, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Their rows, in this order."""
    if not ids:
        return []
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
        sql = (
            "SELECT episode.id, data, body_key, body_size FROM episode "
            f"LEFT JOIN body ON body.ep = episode.id WHERE episode.id IN ({marks})"
        )
        bodies = {ep: body for ep, *body in store.database.execute(sql, some)}
        for number, id in enumerate(some):
            if time.monotonic() > deadline:
                return found, begin + number
            data, key, size = bodies.get(id, (None, None, 0))
            if key is not None and store.bucket is not None:
                try:
                    data = store.bucket.read(key, 0, size)
                except StoreFailed:
                    return found, begin + number
            if id in rows and _has(rows[id], bytes(data or b""), wanted.text):
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
