"""The process of one tracker: it follows metrics.jsonl and hands each new row on.

The file is the queue: training writes it anyway, and neither waits for this process nor notices its
end. What was handed on is remembered in trackers/NAME.json of the run folder, so that a run that
was killed continues the same run of the tracker, with the rows that it did not get.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.report.trackers.tracker import TrackedRun, Tracker, make_tracker
from unirl.storage import disk

_POLL_SECONDS = 0.5
_SAVE_SECONDS = 1.0
"""While there is more to hand on."""
_LONGEST_WAIT_SECONDS = 60.0
"""Between two attempts to reach a server that fails."""
_END_SECONDS = 60.0
"""After the run's end, where nobody is left to end this process."""


@dataclass(frozen=True)
class Job:
    """What a follower is asked to do; it comes as JSON."""

    tracker: str
    name: str
    project: str
    folder: str
    """Of the metrics."""
    config: str
    """The run's config.toml; it may be missing."""
    seed: int


@dataclass
class Handed:
    """How far a tracker is: trackers/NAME.json."""

    id: str | None = None
    """What it calls the run."""
    step: int = -1
    """Of the newest row that it was handed."""
    safe_step: int = -1
    """Of the newest row that it has for good."""
    num_errors: int = 0
    error: str = ""
    """The newest one."""
    is_closed: bool = False

    @staticmethod
    def path(folder: Path, tracker: str) -> Path:
        return folder / "trackers" / f"{tracker}.json"

    @classmethod
    def read(cls, path: Path) -> Handed:
        """As it was left; a new one where there is none, or none that is whole."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls()

    def begin(self, resume_step: int) -> None:
        """What follows is another session. Rows after its checkpoint are made again, and of those
        before it some may be lost: twice is better than never.
        """
        self.step = self.safe_step = min(self.safe_step, resume_step)
        self.num_errors, self.error, self.is_closed = 0, "", False

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        disk.replace_text(path, json.dumps(asdict(self)))


class Follower:
    """Hands rows to a tracker until the run has written its last one."""

    def __init__(self, tracker: Tracker, job: Job) -> None:
        self._tracker, self._job = tracker, job
        folder = Path(job.folder)
        self._rows = _Rows(folder / "metrics.jsonl")
        self._path = Handed.path(folder, job.tracker)
        self._handed = Handed.read(self._path)
        self._first_step = self._handed.step
        self._parent = os.getppid()
        self._next_save = 0.0
        self._unsettled: deque[tuple[float, int]] = deque()
        self._row: dict[str, Any] | None = None
        self._is_open = False

    def run(self) -> None:
        is_last, wait, deadline = False, _POLL_SECONDS, math.inf
        while time.monotonic() < deadline:
            # Whatever was written before the end is read after it.
            if not is_last and self._has_ended(0):
                is_last, deadline = True, time.monotonic() + _END_SECONDS
            try:
                self._hand_on()
                if is_last:
                    self._tracker.close()
                    self._handed.safe_step, self._handed.is_closed = self._handed.step, True
                    self._save()
                    return
                wait = _POLL_SECONDS
            except Exception as error:
                traceback.print_exc()
                self._handed.num_errors += 1
                self._handed.error = f"{type(error).__name__}: {error}"
                self._save()
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
            if is_last:
                time.sleep(_POLL_SECONDS)  # until it works, or the run has waited long enough
            else:
                self._has_ended(wait)

    def _hand_on(self) -> None:
        if not self._is_open:
            self._handed.id = self._tracker.open(self._tracked())
            self._is_open = True
            self._save()
        has_news = False
        while (row := self._row or self._rows.next()) is not None:
            self._row = row  # until it was taken
            step = row["step"]
            if step > self._first_step:
                scalars = {
                    name: value
                    for name, value in row.items()
                    if value is not None and name not in ("step", "seconds")
                }
                self._tracker.log(step, row["seconds"], scalars)
                self._handed.step, has_news = step, True
                self._unsettled.append((time.monotonic(), step))
                if time.monotonic() >= self._next_save:
                    self._save()
            self._row = None
        settled = time.monotonic() - self._tracker.settle_seconds
        while self._unsettled and self._unsettled[0][0] <= settled:
            self._handed.safe_step, has_news = self._unsettled.popleft()[1], True
        if has_news:
            self._save()

    def _tracked(self) -> TrackedRun:
        job = self._job
        try:
            config = tomllib.loads(Path(job.config).read_text(encoding="utf-8"))
        except FileNotFoundError:
            config = {}  # a plan that was made by hand
        return TrackedRun(
            job.name, job.project, Path(job.folder), job.seed, config, self._handed.id
        )

    def _save(self) -> None:
        self._next_save = time.monotonic() + _SAVE_SECONDS
        self._handed.save(self._path)

    def _has_ended(self, seconds: float) -> bool:
        """Whether the run says that its last row is written, or its process is gone."""
        return bool(select.select([0], [], [], seconds)[0]) or os.getppid() != self._parent


class _Rows:
    """The whole lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._waiting: Iterator[bytes] = iter(())

    def next(self) -> dict[str, Any] | None:
        """The next row; None: there is none yet."""
        line = next(self._waiting, None)
        if line is None:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                found = file.read(1 << 20)
            lines = found[: found.rfind(b"\n") + 1].splitlines(keepends=True)
            self._waiting = iter(lines)
            line = next(self._waiting, None)
        if line is None:
            return None
        self._offset += len(line)
        row: dict[str, Any] = json.loads(line)
        return row


def main() -> None:
    """Follow a run, or with --check say as JSON why that cannot be."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run says when it ends
    if sys.argv[1] == "--check":
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # packages print what they like
        try:
            make_tracker(sys.argv[2]).check()
            parts: Mapping[str, Any] = {}
        except UniRLError as error:
            parts = {"parts": error.parts}
        except Exception as error:
            what = f"tracker {sys.argv[2]} does not start: {type(error).__name__}"
            rule = str(error).splitlines()[0] if str(error) else "its package must be importable"
            parts = {"parts": [what, rule, f"repair it, or leave {sys.argv[2]} out of run.track"]}
        answers.write(json.dumps(parts) + "\n")
        answers.flush()
        os._exit(0)  # threads and services of a package are not waited for
    os.nice(5)
    job = Job(**json.loads(sys.argv[1]))
    Follower(make_tracker(job.tracker), job).run()
