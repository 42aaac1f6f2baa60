"""Imports of what is large: torch is half a million objects, transformers as many again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """In this block the garbage collector rests. All that is imported stays, and going through it
    time and again as it grows takes a fifth of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_imported() -> None:
    """Let the collector leave out for good what is there now: neither the training nor a process
    that is forked goes through what was imported. For commands, which own their process.
    """
    gc.freeze()
