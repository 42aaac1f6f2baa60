"""Standard output and error of a run that continues when nothing reads them any more: the
terminal was closed, or the other end of the pipe (head, less, ssh).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from unirl.storage import disk


class LastingStream:
    """A text stream whose reader may go away: what is written from then on is dropped.

    A full disk is an error still: it has more to lose than what is shown.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        """Why nothing is shown any more. To be logged elsewhere: who writes may hold a lock."""

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        if disk.is_full(error):
            raise error
        if isinstance(error, BlockingIOError):  # a slow reader of a pipe that does not block
            return
        self.lost = error
        # Below Python: what is in buffers, and what native code writes, goes the same way.
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """In this block, standard output and error are LastingStreams; it may be within another."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = lasting = [_lasting(stream) for stream in before]
    try:
        yield
        for stream in lasting:
            stream.flush()
    finally:
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None) -> TextIO:
    if isinstance(stream, LastingStream):
        return stream
    # None: the process was started with the descriptor closed.
    return cast(TextIO, LastingStream(stream or open(os.devnull, "w")))
