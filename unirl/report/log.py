"""Sentences about a run: all of them to log.txt, those that matter to the console."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirl.report.console import Console
from unirl.run_events import EventFile

_CHECKPOINTS = "unirl.runners.hooks"
"""Whose sentences of level INFO are notes as well: a checkpoint was written."""


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """In this block, what `unirl` logs is appended to `path`, and events to a file beside it."""
    handler = _FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("unirl")
    level = root.level
    root.setLevel(logging.INFO)
    try:
        with _attached(handler), _attached(EventFile(path.parent)):
            yield
    finally:
        root.setLevel(level)
        with contextlib.suppress(OSError):
            handler.close()


@contextmanager
def notes_on(console: Console) -> Iterator[None]:
    """In this block, warnings of `unirl` and written checkpoints are notes on the console."""
    with _attached(_NoteHandler(console)):
        yield


@contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger("unirl")
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _FileHandler(logging.FileHandler):
    """A full disk costs sentences, not the run; and no trace is printed: metrics and checkpoints
    report the disk.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _NoteHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One line; the trace of an error is in log.txt."""
        if record.levelno < logging.WARNING and record.name != _CHECKPOINTS:
            return
        text = record.getMessage().partition("\n")[0]
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text += f": {type(error).__name__}: {error}".partition("\n")[0]
        # A console that cannot be written to ends the run with its next row, which says why.
        with contextlib.suppress(OSError):
            self._console.note(text)
