"""Files of run folders, read without trusting them: no link out of the folder is followed, nothing
waits on a pipe, sizes are bounded.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_PIECE = 1 << 16
MAX_TEXT = 1 << 20
"""Bytes of a file that is read whole."""
MAX_LINE = 4 << 20
"""Bytes of a line; longer ones are damaged."""


@contextmanager
def opened(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A regular file inside `folder`. Raises OSError where there is none, or a link leads out."""
    path = folder / name
    if not is_inside(path, folder):
        raise PermissionError(1, "it leads out of the run folder", str(path))
    # Not to wait for the other end of a named pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PermissionError(1, "it is not a regular file", str(path))
        yield file


def is_inside(path: Path, folder: Path) -> bool:
    """Whether it is below the folder when all links are followed."""
    return os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)


def text_of(folder: Path, name: str) -> str:
    """The beginning of a text file, "" where it cannot be read."""
    with suppress(OSError), opened(folder, name) as file:
        return file.read(MAX_TEXT).decode("utf-8", "replace")
    return ""


def signature(path: Path) -> tuple[int, ...]:
    """Another one whenever the file was written to or replaced; () where it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def last_rows(folder: Path, name: str, number: int) -> list[dict[str, Any]]:
    """The last rows of a file of JSON lines, read from its end."""
    try:
        with opened(folder, name) as file:
            end = file.seek(0, os.SEEK_END)
            begin, data = end, b""
            while begin > 0 and data.count(b"\n") <= number and end - begin < MAX_LINE:
                size = min(max(_PIECE, len(data)), begin)
                begin -= size
                file.seek(begin)
                data = file.read(size) + data
    except OSError:
        return []
    lines = data.split(b"\n")
    # What follows the last newline is being written; what precedes the first has lost its head.
    return rows_of(lines[1 if begin else 0 : -1])[-number:]


def rows_of(lines: list[bytes]) -> list[dict[str, Any]]:
    """The objects among lines of JSON; damaged lines are left out."""
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line.decode("utf-8", "replace"))
            if isinstance(row, dict):
                found.append(row)
    return found


class Tail:
    """What was appended to a file of JSON lines since the last look."""

    def __init__(self, folder: Path, name: str, *, from_end: bool = False) -> None:
        self._folder, self._name = folder, name
        self._place = Place()
        self._signature: tuple[int, ...] = ()
        if from_end:
            self._signature = signature(folder / name)
            with suppress(OSError), opened(folder, name) as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - MAX_LINE))
                data = file.read()
                self._place.move(file, end - len(data) + data.rfind(b"\n") + 1)

    def rows(self) -> tuple[list[dict[str, Any]], bool]:
        """New rows, and whether the file began again: a resumed run has cut off its end. At most
        `MAX_LINE` bytes at a time.
        """
        now = signature(self._folder / self._name)
        if now == self._signature:
            return [], False
        try:
            with opened(self._folder, self._name) as file:
                begins_again = not self._place.is_in(file)
                if begins_again:
                    self._place = Place()
                file.seek(self._place.offset)
                data = file.read(MAX_LINE)
                end = data.rfind(b"\n") + 1
                if not end and len(data) == MAX_LINE:
                    end = len(data)
                self._place.move(file, self._place.offset + end)
        except OSError:
            return [], False
        if len(data) < MAX_LINE:
            self._signature = now
        return rows_of(data[:end].split(b"\n")), begins_again


class Place:
    """How far a growing file was read. Where it was replaced or cut, that place is not in it."""

    _MARK = 64

    def __init__(self) -> None:
        self.offset, self._mark = 0, b""
        self._node: tuple[int, int] | None = None

    def is_in(self, file: BinaryIO) -> bool:
        found = os.fstat(file.fileno())
        if self._node is None:
            return True
        begin = self.offset - len(self._mark)
        return (
            self._node == (found.st_dev, found.st_ino)
            and found.st_size >= self.offset
            # A resumed run may write as much again as it has cut off.
            and os.pread(file.fileno(), len(self._mark), begin) == self._mark
        )

    def move(self, file: BinaryIO, offset: int) -> None:
        found = os.fstat(file.fileno())
        self._node, self.offset = (found.st_dev, found.st_ino), offset
        size = min(offset, self._MARK)
        self._mark = os.pread(file.fileno(), size, offset - size)
