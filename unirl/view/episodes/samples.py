"""Completions that a language run has shown in samples/samples.jsonl: found like episodes where
there is no store, and what the learner says of the tokens of stored ones.

The file is read once, then what was appended. Of each row its place in the file is kept, and what
can be filtered by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.view.answers import cut
from unirl.view.episodes.index import EpisodeIndex
from unirl.view.episodes.vocabulary import Vocabulary
from unirl.view.episodes.wanted import Wanted
from unirl.view.files import MAX_LINE, Place, is_inside, opened, rows_of
from unirl.view.folders import NotThere
from unirl.view.rows import number

NAME = "samples/samples.jsonl"
_PIECE = 4 << 20
_MAX_BYTES = 256 << 20
"""Of a long file its end."""
_SEARCH_SECONDS = 0.15


class Samples:
    """Those of one run. weights: of its rewards, in the order in which rows have them."""

    def __init__(self, folder: Path, weights: Sequence[tuple[str, float]]) -> None:
        self._folder, self._weights = folder, weights
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._place, self._index = Place(), EpisodeIndex()
        self._where: list[tuple[int, int]] = []
        """Begin and length of each row."""
        self._of_ticket: dict[int, list[int]] = {}
        self._num_left_out = 0

    @property
    def is_there(self) -> bool:
        path = self._folder / NAME
        return path.is_file() and is_inside(path, self._folder)

    def find(self, wanted: Wanted) -> dict[str, Any]:
        with self._lock:
            self._catch_up()
            found = self._index.find(wanted)
            more: dict[str, Any] = {"source": "samples"}
            if wanted.text:
                num_found = len(found)
                found, searched = self._search(found, wanted.text.lower())
                more |= {"searched": searched, "unsearched": num_found - searched}
            end = wanted.after + wanted.limit
            return {
                "total": len(found),
                "rows": [self._row(id, row) for id, row in self._read(found[wanted.after : end])],
                "next": str(end) if end < len(found) else None,
                "facets": self._index.facets(),
                **more,
            }

    def of_ticket(self, ticket: int) -> list[dict[str, Any]]:
        """A group, as it was shown last: a ticket is shown once, but for what reuses samples."""
        with self._lock:
            self._catch_up()
            ids = self._of_ticket.get(ticket, [])[-1000:]
            return [self._row(id, row) for id, row in self._read(ids)]

    def learned(self, ticket: int, place: int) -> list[dict[str, Any]]:
        """What the learner has shown of the tokens of one completion."""
        with self._lock:
            self._catch_up()
            rows = [row for _, row in self._read(self._of_ticket.get(ticket, [])[-1000:])]
        found = [row["each"] for row in rows
                 if row.get("place") == place and isinstance(row.get("each"), dict)]  # fmt: skip
        return found[-1:]

    def open(self, id: int, vocabulary: Vocabulary) -> dict[str, Any]:
        with self._lock:
            self._catch_up()
            found = dict(self._read([id] if 0 <= id < len(self._where) else []))
        if id not in found:
            raise NotThere(
                f"there is no sample {id}", "it has a number of the list", "load the list again"
            )
        return self._opened(id, found[id], vocabulary)

    def _opened(self, id: int, row: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
        prompt, text = str(row.get("prompt", "")), str(row.get("completion", ""))
        each = row.get("each") if isinstance(row.get("each"), dict) else None
        tokens = [] if each is None else list(_tokens(each, vocabulary))
        line = self._row(id, row)
        turn = {
            "index": 0, "parent": None, "segment": 0, "role": "assistant", "origin": "prompt",
            "trained": True, "tool": None, "ok": None, "error": None,
            "given": cut(prompt), "text": cut(text), "calls": [], "reward": None,
            "seconds_model": None, "seconds_tool": None, "finish": row.get("finish"),
            "version": line["version_max"], "num_drawn": line["tokens"], "tokens": tokens,
            "cut": max(0, int(line["tokens"] or 0) - len(tokens)) if tokens else None,
            "tokens_recorded": bool(tokens),
        }  # fmt: skip
        return {**line, "rewards": self._rewards(row), "turns": [turn], "outline": [],
                "source": "samples"}  # fmt: skip

    def _row(self, id: int, row: Mapping[str, Any]) -> dict[str, Any]:
        _, _, _, ending, _, _, reward, low, high, turns, tokens, _ = self._indexed(id, row)
        return {
            "id": id,
            "ticket": row.get("ticket"),
            "place": row.get("place"),
            "task": None,
            "ending": ending,
            "reward": reward,
            "advantage": row.get("advantage"),
            "version_min": low,
            "version_max": high,
            "trained_version": row.get("update"),
            "step": row.get("step"),
            "turns": turns,
            "tokens": tokens,
            "text": cut(str(row.get("completion", "")), 300),
            "prompt": cut(str(row.get("prompt", "")), 300),
        }

    def _rewards(self, row: Mapping[str, Any]) -> dict[str, Any]:
        values, outcomes = row.get("reward"), row.get("outcome")
        if not isinstance(values, list) or not isinstance(outcomes, list):
            return {}
        return {
            name: value if outcome == 0 else "no value: failed or timed out"
            for (name, _), value, outcome in zip(self._weights, values, outcomes, strict=False)
        }

    def _indexed(self, id: int, row: Mapping[str, Any]) -> tuple[Any, ...]:
        versions = _numbers(row.get("versions"))
        rewards, outcomes = _numbers(row.get("reward")), _numbers(row.get("outcome"))
        weights = [weight for _, weight in self._weights] or [1.0] * len(rewards)
        total: float | None = 0.0
        for weight, value, outcome in zip(weights, rewards, outcomes, strict=False):
            if outcome == 0:
                total = None if total is None else total + weight * value
            elif weight:
                total = None
        return (
            id, "", "", cut(str(row.get("finish") or ""), 40), "train", "trained", total,
            min(versions, default=None), max(versions, default=None), 1,
            _number(row.get("tokens")), None,
        )  # fmt: skip

    def _catch_up(self) -> None:
        try:
            with opened(self._folder, NAME) as file:
                if not self._place.is_in(file):
                    self._forget()
                size = file.seek(0, 2)
                begin = self._place.offset
                if begin == 0 and size > _MAX_BYTES:
                    file.seek(size - _MAX_BYTES)
                    begin = size - _MAX_BYTES + len(file.readline(MAX_LINE))
                while begin < size:
                    file.seek(begin)
                    data = file.read(_PIECE)
                    end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _PIECE else 0)
                    if not end:
                        break
                    self._add(data[:end], begin)
                    begin += end
                self._place.move(file, begin)
        except OSError:
            self._forget()

    def _add(self, data: bytes, begin: int) -> None:
        indexed = []
        for line in data.split(b"\n")[:-1]:
            for row in rows_of([line]):
                id = len(self._where)
                self._where.append((begin, len(line)))
                indexed.append(self._indexed(id, row))
                if isinstance(ticket := row.get("ticket"), int):
                    self._of_ticket.setdefault(ticket, []).append(id)
            begin += len(line) + 1
        self._index.add(indexed)

    def _read(self, ids: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        found = []
        try:
            with opened(self._folder, NAME) as file:
                for id in ids:
                    begin, size = self._where[id]
                    file.seek(begin)
                    found += [(id, row) for row in rows_of([file.read(size)])]
        except OSError:
            return []
        return found

    def _search(self, ids: Sequence[int], text: str) -> tuple[list[int], int]:
        deadline = time.monotonic() + _SEARCH_SECONDS
        found: list[int] = []
        try:
            with opened(self._folder, NAME) as file:
                for searched, id in enumerate(ids):
                    if time.monotonic() > deadline:
                        return found, searched
                    begin, size = self._where[id]
                    file.seek(begin)
                    for row in rows_of([file.read(size)]):
                        if any(
                            text in str(row.get(k, "")).lower() for k in ("prompt", "completion")
                        ):
                            found.append(id)
        except OSError:
            return [], 0
        return found, len(ids)


def _tokens(each: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    names = ("token", "drawn", "version", "logp", "new_logp", "advantage")
    found = (each.get(name) for name in names)
    columns: list[list[Any]] = [column if isinstance(column, list) else [] for column in found]
    for token, drawn, version, *numbers in zip(*columns, strict=False):
        entry = {"text": vocabulary.spell(token) if isinstance(token, int) else "?",
                 "id": token, "drawn": bool(drawn)}  # fmt: skip
        if drawn:
            named = zip(("version", "logp", "learner_logp", "advantage"), (version, *numbers),
                        strict=True)  # fmt: skip
            entry |= {name: value for name, value in named if _number(value) is not None}
        yield entry


def _numbers(values: object) -> list[float]:
    return (
        [value for value in values if _number(value) is not None]
        if isinstance(values, list)
        else []
    )


def _number(value: object) -> float | None:
    found = number(value)
    return None if found != found else value  # type: ignore[return-value]
