"""What happens to a run's members, as records: started, died, restarted, drained, scaled, gave up.

The code that logs such a sentence says with `extra=event(...)` what it is about. A run folder keeps
the records in events.jsonl, alerts are made of them, and a node sends its own to the learner's
process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NAME = "events.jsonl"
_FIELD = "run_event"
_MAX_WAITING, _MAX_TEXT = 20, 500
"""All of it has to fit into one text of a node's connection."""


def event(kind: str, **facts: Any) -> dict[str, Any]:
    """`extra` of a log call. facts: member, agent, node, cause, and whatever numbers there are."""
    return {_FIELD: {"event": kind, **{k: v for k, v in facts.items() if v not in (None, "")}}}


def event_of(record: logging.LogRecord) -> dict[str, Any] | None:
    """What a log record says of a run's members; None where it is a sentence alone."""
    found: dict[str, Any] | None = getattr(record, _FIELD, None)
    return None if found is None else {"time": round(record.created, 3), **found}


class EventFile(logging.Handler):
    """Appends events to a run's folder. A full disk costs events, not the run."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(logging.INFO)
        self._path = run_dir / NAME

    def emit(self, record: logging.LogRecord) -> None:
        if (found := event_of(record)) is not None:
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found, default=str) + "\n")


class EventBuffer(logging.Handler):
    """Keeps a node's newest events, numbered from 1, for the learner's process."""

    def __init__(self, on_event: Callable[[], None]) -> None:
        super().__init__(logging.INFO)
        self._last, self._waiting = 0, deque[dict[str, Any]](maxlen=_MAX_WAITING)
        self._on_event = on_event

    def emit(self, record: logging.LogRecord) -> None:
        if (found := event_of(record)) is not None:
            self._last += 1
            short = {k: v[:_MAX_TEXT] if isinstance(v, str) else v for k, v in found.items()}
            text = record.getMessage()[:_MAX_TEXT]
            self._waiting.append({"number": self._last, "text": text, **short})
            self._on_event()

    def newest(self) -> list[dict[str, Any]]:
        """All that it keeps."""
        return list(self._waiting)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """A run's events in their order; what a kill has torn is left out."""
    rows = []
    with contextlib.suppress(OSError):
        for line in (run_dir / NAME).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(row := json.loads(line), Mapping) and "event" in row:
                    rows.append(dict(row))
    return rows


def wall_time(seconds: float) -> str:
    """For people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
