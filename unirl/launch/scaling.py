"""`unirl scale`: a wish in the run's folder, and the run's answer.

The command writes `scale.json` there; the run looks for it between updates, removes it and writes
what came of it to `scale.answer.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from unirl.core.pool import Pool
from unirl.errors import UniRLError
from unirl.run_events import event
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.storage import disk

log = logging.getLogger(__name__)

WISH, ANSWER = "scale.json", "scale.answer.json"
_LOOK_SECONDS = 0.25


def ask(run_dir: Path, pool: str, size: int | None, seconds: float) -> None:
    """Let a run that trains in this folder change a pool; returns when it did. size: None lets it
    find the size by itself. UniRLError where it refuses, or says nothing within so many seconds.
    """
    wish, answer = run_dir / WISH, run_dir / ANSWER
    answer.unlink(missing_ok=True)
    disk.replace_text(wish, json.dumps({"pool": pool, "size": size}))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            parts = json.loads(answer.read_text(encoding="utf-8"))
            answer.unlink(missing_ok=True)
            if parts:
                raise UniRLError(*parts)
            return
        time.sleep(0.05)
    wish.unlink(missing_ok=True)
    raise UniRLError(
        f"the run in {run_dir} did not answer for {seconds:g} s",
        "a run that trains looks for wishes between two updates",
        "see whether it trains: the end of its log.txt",
    )


class ScaleHook:
    """Changes the size of a pool when the run's folder says so."""

    def __init__(
        self, run_dir: Path, plan: Plan, resize: Callable[[Pool, int | None], None]
    ) -> None:
        self._wish, self._answer = run_dir / WISH, run_dir / ANSWER
        self._plan, self._resize, self._looked_at = plan, resize, 0.0
        for left in (self._wish, self._answer):  # by a run that was killed
            left.unlink(missing_ok=True)

    def after_update(self, loop: TrainLoop) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            wish = json.loads(self._wish.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self._wish.unlink(missing_ok=True)
        parts: tuple[str, ...] = ()
        try:
            size = None if wish["size"] is None else int(wish["size"])
            self._resize(self._pool(str(wish["pool"])), size)
            number = "as many members as are of use" if size is None else f"{size} members"
            about = event("scaled", pool=wish["pool"], size=size, cause="unirl scale")
            log.info(
                "pool %s has %s from now on, by unirl scale", wish["pool"], number, extra=about
            )
        except UniRLError as error:
            parts = error.parts
        disk.replace_text(self._answer, json.dumps(parts))

    def _pool(self, name: str) -> Pool:
        for pool in self._plan.pools:
            if pool.name == name:
                return pool
        raise UniRLError(
            f"pool {name!r} is unknown",
            f"the run has {', '.join(pool.name for pool in self._plan.pools)}",
            "name one of these",
        )

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""
