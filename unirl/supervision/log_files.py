"""Bounds what processes write to their logs: an environment that prints fills no disk.

A log that has grown too long is emptied; the newest part of it stands in a second file beside it,
until the next time. What writes appends, and so continues at the beginning: programs that the
process started too, which could not be given another file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

MOST_BYTES = 4 * 2**20
"""Of a log and of the file beside it, and what is printed between two looks."""
_LOOK_SECONDS = 0.1


class BoundedLogs:
    """A thread that keeps logs short. paths: those that there are by now."""

    def __init__(self, paths: Callable[[], Iterable[Path]]) -> None:
        self._paths, self._closed = paths, threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look once more: call it when nobody writes any longer."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while True:
            last = self._closed.wait(_LOOK_SECONDS)
            for path in self._paths():
                # A disk that is full takes no second file: then the log stays as it is.
                with contextlib.suppress(OSError):
                    shorten(path)
            if last:
                return


def shorten(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Move what is in a log to the file beside it, if it is longer than this."""
    size = os.stat(path).st_size
    if size <= most_bytes:
        return
    aside = path.with_suffix(f".before{path.suffix}")
    with path.open("rb+", buffering=0) as log, aside.open("wb", buffering=0) as copy:
        block = os.fstat(log.fileno()).st_blksize
        cut = (size - 1) // block * block
        log.seek(max(0, cut - most_bytes))
        while (left := cut - log.tell()) and (data := log.read(min(left, 2**20))):
            copy.write(data)
        if cut and _remove_beginning(log.fileno(), cut):
            return
        # To the end, which moves, and hardly a moment between the end and emptying it: a crash may
        # print its last words now.
        while data := log.read(2**20):
            copy.write(data)
            if copy.tell() > 4 * most_bytes:
                break
        log.truncate(0)


def _remove_beginning(fd: int, num_bytes: int) -> bool:
    """Take whole blocks away from the beginning, and nothing that is appended meanwhile; whether
    the file system can (ext4, xfs).
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "fallocate"):
        return False
    collapse_range = 8
    arguments = (ctypes.c_int(collapse_range), ctypes.c_int64(0), ctypes.c_int64(num_bytes))
    return bool(libc.fallocate(ctypes.c_int(fd), *arguments) == 0)
