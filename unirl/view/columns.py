"""metrics.jsonl as columns of numbers: read when a name is asked for, then only what was appended.

A run of 100 000 rows has 100 MB of text. Columns of what is looked at are kept, 0.8 MB each, and
those that were not looked at for longest are dropped.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from unirl.view.files import MAX_LINE, Place, opened, rows_of, signature
from unirl.view.folders import Run
from unirl.view.rows import KEYS, Array, column_reader, number

NAME = "metrics.jsonl"
_PIECE = 4 << 20
_LOOKS = 200
"""Places of a long file where its names are looked for."""
MAX_BYTES = 64 << 20
"""Of all columns that are kept."""


class Columns:
    """One run's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._place = Place()
        self._columns: dict[str, Array] = {}
        self._names: tuple[tuple[int, ...], list[str]] = ((), [])

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def get(self, names: Iterable[str]) -> dict[str, Array]:
        """Columns of these names and of `step` and `seconds`, all [rows]. Of a name that no row
        has: NaN.
        """
        asked = list(dict.fromkeys((*KEYS, *names)))
        with self._lock:
            try:
                with opened(self._folder, NAME) as file:
                    self._catch_up(file, asked)
            except OSError:
                return {name: np.empty(0) for name in asked}
            return {name: self._columns[name] for name in asked}

    def names(self) -> list[str]:
        """Names that some row has, looked for in the first and last rows and between them."""
        with self._lock:
            now = signature(self._folder / NAME)
            if now != self._names[0]:
                self._names = now, _names(self._folder)
            return self._names[1]

    def _catch_up(self, file: BinaryIO, asked: Sequence[str]) -> None:
        if not self._place.is_in(file):
            self._place, self._columns = Place(), {}
        known = list(self._columns)
        new = [name for name in asked if name not in self._columns]
        if new and known:
            # What is kept ends at the place; the new ones are read up to there.
            found = _read(file, new, 0, self._place.offset)[0]
            if len(found[0]) == len(self._columns["step"]):
                self._columns |= zip(new, found, strict=True)
            else:  # a line that is damaged for one and not for another
                self._place, self._columns = Place(), {}
                known = [*known, *new]
        names = list(dict.fromkeys((*known, *new)))
        size = os.fstat(file.fileno()).st_size
        found, end = _read(file, names, self._place.offset, size)
        for name, column in zip(names, found, strict=True):
            before = self._columns.get(name)
            together = column if before is None else np.concatenate([before, column])
            self._columns[name] = together if len(column) or before is None else before
        self._place.move(file, end)


class ColumnStore:
    """Columns of all runs that are looked at."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, Columns] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, run: Run) -> list[str]:
        return self._of(run).names()

    def get(self, run: Run, names: Iterable[str]) -> dict[str, Array]:
        found = self._of(run).get(names)
        with self._lock:
            total = sum(each.num_bytes for each in self._runs.values())
            while total > MAX_BYTES and len(self._runs) > 1:
                total -= self._runs.popitem(last=False)[1].num_bytes
        return found

    def _of(self, run: Run) -> Columns:
        with self._lock:
            found = self._runs.setdefault(run.id, Columns(run.path))
            self._runs.move_to_end(run.id)
            return found


def _read(file: BinaryIO, names: Sequence[str], begin: int, end: int) -> tuple[list[Array], int]:
    """Columns of the whole lines between two places, and where these lines end."""
    read = column_reader(names)
    pieces: list[list[Array]] = [[] for _ in names]
    file.seek(begin)
    rest = b""
    while begin + len(rest) < end:
        data = rest + file.read(min(_PIECE, end - begin - len(rest)))
        if len(data) == len(rest):
            break  # it was cut while it was read
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) > MAX_LINE:
            whole = len(data)
        for column, found in zip(pieces, read(data[:whole]), strict=True):
            column.append(found)
        begin, rest = begin + whole, data[whole:]
    return [np.concatenate(column) if column else np.empty(0) for column in pieces], begin


def _names(folder: Path) -> list[str]:
    found: dict[str, None] = {}
    try:
        with opened(folder, NAME) as file:
            size = os.fstat(file.fileno()).st_size
            whole = size <= _LOOKS * (1 << 14)
            for place in [0] if whole else np.linspace(0, size, _LOOKS, dtype=int).tolist():
                file.seek(max(0, place - (1 << 13)))
                data = file.read(size if whole else 1 << 14)
                for row in rows_of(data.split(b"\n")):
                    found |= {name: None for name, value in row.items() if number(value) == value}
    except OSError:
        pass
    return sorted(name for name in found if name not in KEYS)
