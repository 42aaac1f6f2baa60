"""What a run is doing, as far as its folder shows: trains, ended, gave up, was killed.

No lock is tried to find out: that would keep the run from its own folder for a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.storage import run_lock
from unirl.view.files import text_of
from unirl.view.rows import number

SILENT_SECONDS = 120.0
"""Without a row or an event, after which a run of another machine counts as stale."""


def run_event(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The newest event that is about the run as a whole."""
    return next((each for each in reversed(events) if each.get("member") == "run"), {})


def state_of(folder: Path, events: Sequence[Mapping[str, Any]], updated: float) -> str:
    """training, ended, interrupted, gave_up, or stale: it has ended without saying so."""
    newest = run_event(events)
    kind = newest.get("event")
    owner = _owner(folder)
    if owner is not None and kind not in ("ended", "gave_up") and _lives(owner, updated):
        return "training"
    if kind == "ended":
        return "interrupted" if newest.get("cause") == "interrupted" else "ended"
    if kind == "gave_up" or (folder / "failed.txt").is_file():
        return "gave_up"
    return "stale"


def _owner(folder: Path) -> Mapping[str, Any] | None:
    """What the lock's file says of the process that trains; None: none does."""
    with contextlib.suppress(ValueError):
        found = json.loads(text_of(folder, run_lock.NAME))
        if isinstance(found, dict) and isinstance(found.get("pid"), int):
            return found
    return None


def _lives(owner: Mapping[str, Any], updated: float) -> bool:
    if owner.get("host") != socket.gethostname():
        return time.time() - updated < SILENT_SECONDS
    try:
        stat = Path(f"/proc/{owner['pid']}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    # Another process may have got its number since.
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    began = boot + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return stat[0] not in "ZX" and began <= number(owner.get("since")) + 2
