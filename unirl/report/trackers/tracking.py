"""A run's trackers, as the run sees them: processes that are started, looked at now and then, and
waited for at the end, for so long and no longer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from unirl.errors import UniRLError
from unirl.report.trackers.follower import Handed, Job
from unirl.report.trackers.tracker import PACKAGES, require_installed

log = logging.getLogger(__name__)

END_SECONDS = 15.0
"""How long the end of a run waits for its trackers."""
_CHECK_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); " + (
    "from unirl.report.trackers.follower import main; main()"
)


class _Counts(Protocol):
    def total(self, name: str, value: float) -> None: ...


class _Loop(Protocol):
    """What a training loop shows of itself."""

    @property
    def metrics(self) -> _Counts: ...


def check_trackers(names: Sequence[str]) -> None:
    """Raise UniRLError where one of these is not installed, or nobody is logged in to it. Servers
    are not asked.
    """
    for name in names:
        require_installed(name)
    checks = {
        name: _start(["--check", name], subprocess.PIPE) for name in names if name in PACKAGES
    }
    for name, process in checks.items():
        try:
            found = json.loads(process.communicate(timeout=_CHECK_SECONDS)[0])
        except (subprocess.TimeoutExpired, ValueError):
            log.warning("tracker %s could not be checked before the start", name)
            continue
        finally:
            _kill(process)
        if "parts" in found:
            raise UniRLError(*found["parts"])


class Trackers:
    """The trackers of one learner's metrics. As a hook before the one that writes them: counts
    their errors.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        folder: Path,
        *,
        seed: int,
        project: str = "",
        resume_step: int | None = None,
    ) -> None:
        """folder: of the metrics, which is run_dir or in it. resume_step: as of the metrics."""
        run_dir, self._folder = run_dir.resolve(), folder.resolve()
        title = "-".join([run_dir.name, *self._folder.relative_to(run_dir).parts])
        (folder / "logs").mkdir(exist_ok=True)
        self._followers = []
        for name in names:
            config = str(run_dir / "config.toml")
            job = Job(name, title, project, str(self._folder), config, seed)
            path = Handed.path(folder, name)
            handed = Handed() if resume_step is None else Handed.read(path)
            handed.begin(-1 if resume_step is None else resume_step)
            handed.save(path)
            with open(folder / "logs" / f"tracker-{name}.txt", "ab") as file:
                process = _start([json.dumps(asdict(job))], file)
            self._followers.append(_Follower(name, process, path))
        self._next_look = 0.0

    @property
    def pids(self) -> dict[str, int]:
        """Their processes."""
        return {follower.name: follower.pid for follower in self._followers}

    def after_update(self, loop: _Loop) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._look(loop)

    def at_end(self, loop: _Loop) -> None:
        self._look(loop)

    def _look(self, loop: _Loop) -> None:
        for follower in self._followers:
            if num_new := follower.look():
                loop.metrics.total("faults/tracker_errors", num_new)

    def close(self) -> None:
        """Let them hand on what is left, for at most END_SECONDS, and end them."""
        deadline = time.monotonic() + END_SECONDS
        try:
            for follower in self._followers:
                follower.tell_end()
            for follower in self._followers:
                follower.wait(deadline)
        finally:
            for follower in self._followers:
                follower.kill()


class _Follower:
    """The process of one tracker, from outside."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], path: Path) -> None:
        self.name, self.pid = name, process.pid
        self._process, self._path = process, path
        self._num_errors = 0
        self._has_warned = self._is_gone = False

    def look(self) -> int:
        """How many errors are new; the first one is a warning."""
        handed = Handed.read(self._path)
        num_new = max(handed.num_errors - self._num_errors, 0)
        self._num_errors += num_new
        if num_new:
            self._warn(handed.error)
        if not self._is_gone and (code := self._process.poll()) is not None:
            self._is_gone, num_new = True, num_new + 1
            self._warn(f"its process ended with code {code}")
        return num_new

    def tell_end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"end\n")
            self._process.stdin.close()

    def wait(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        if not Handed.read(self._path).is_closed:
            log.warning(
                "tracker %s has not taken everything within %g s of the run's end; the rest is sent"
                " when the run is resumed",
                self.name,
                END_SECONDS,
            )

    def kill(self) -> None:
        _kill(self._process)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "tracker %s: %s (logs/tracker-%s.txt); training does not wait, and what it lacks is"
                " sent later, or when the run is resumed",
                self.name,
                _without_passwords(why),
                self.name,
            )


def _start(words: Sequence[str], output: Any) -> subprocess.Popen[bytes]:
    """A process that a terminal's signals do not reach, with the modules of this one."""
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path), *words],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL if output == subprocess.PIPE else subprocess.STDOUT,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it with what it started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _without_passwords(text: str) -> str:
    """Its first line, without what stands between :// and @."""
    return re.sub(r"://[^/@\s]+@", "://", text).partition("\n")[0][:200]
