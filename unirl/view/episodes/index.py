"""What is known of many episodes, as columns in memory: any filter over 100 000 of them takes
milliseconds, and 10 MB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from unirl.view.answers import cut
from unirl.view.episodes.wanted import SORTS, Wanted

WORDS = ("task", "task_id", "ending", "split", "state")
NUMBERS = ("reward", "version_min", "version_max", "turns", "tokens", "seconds")
_FACETS = ("task", "ending", "split", "state")
_MAX_FACETS = 200


class EpisodeIndex:
    """Rows are numbered in the order in which they came."""

    def __init__(self) -> None:
        self._words: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        self._codes = {name: np.empty(0, np.int32) for name in WORDS}
        self._numbers = {name: np.empty(0, np.float64) for name in NUMBERS}
        self._ids = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def last_id(self) -> int:
        """-1: there is none."""
        return int(self._ids[-1]) if len(self._ids) else -1

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """rows: id, then `WORDS`, then `NUMBERS`; None where it is not known."""
        columns = list(zip(*rows, strict=True))
        if not columns:
            return
        ids, words = columns[0], columns[1 : 1 + len(WORDS)]
        self._ids = np.concatenate([self._ids, np.array(ids, np.int64)])
        for name, column in zip(WORDS, words, strict=True):
            known = self._words[name]
            codes = [known.setdefault(str(value or ""), len(known)) for value in column]
            self._codes[name] = np.concatenate([self._codes[name], np.array(codes, np.int32)])
        for name, column in zip(NUMBERS, columns[1 + len(WORDS) :], strict=True):
            values = np.array([np.nan if each is None else each for each in column], np.float64)
            self._numbers[name] = np.concatenate([self._numbers[name], values])

    def find(self, wanted: Wanted) -> list[int]:
        """Ids in the order that is wanted; texts are not looked at."""
        chosen = np.ones(len(self), bool)
        for name, value in wanted.equal.items():
            chosen &= self._codes[name] == self._words[name].get(value, -1)
        numbers = self._numbers
        for column, bound, is_least in (
            (numbers["reward"], wanted.reward_min, True),
            (numbers["reward"], wanted.reward_max, False),
            (numbers["version_max"], wanted.version_min, True),
            (numbers["version_min"], wanted.version_max, False),
        ):
            if bound is not None:  # NaN is neither
                chosen &= column >= bound if is_least else column <= bound
        rows = np.flatnonzero(chosen)
        name, is_falling = SORTS[wanted.sort]
        if name == "id":
            rows = rows[::-1] if is_falling else rows
        else:
            rows = rows[::-1]  # of equal ones the newest is first
            keys = -numbers[name][rows] if is_falling else numbers[name][rows]
            rows = rows[np.argsort(keys, kind="stable")]  # NaN comes last
        found: list[int] = self._ids[rows].tolist()
        return found

    def facets(self) -> dict[str, list[dict[str, Any]]]:
        """How many have each word, the most frequent first."""
        found = {}
        for name in _FACETS:
            counts = np.bincount(self._codes[name], minlength=len(self._words[name])).tolist()
            pairs = Counter(dict(zip(self._words[name], counts, strict=True)))
            found[name] = [
                {"value": cut(value, 200), "count": count}
                for value, count in pairs.most_common(_MAX_FACETS)
                if value
            ]
        return found
