"""The runs of a sweep as processes: each is what `unirl train` and `unirl resume` make of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unirl.errors import UniRLError
from unirl.host import usable_cores
from unirl.run_events import read_events
from unirl.storage import run_lock
from unirl.supervision.process_settings import die_with_parent
from unirl.sweep.launcher import End, Training
from unirl.sweep.trial import SeedRun, Trial

RESUMABLE = ("interrupted", "pause_steps")
"""Why a run ends that has not come to its end."""
LOCK_SECONDS = 120.0
"""How long a run that is to end may take to write its checkpoint."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Ended:
    """How a run's newest session ended."""

    cause: str
    steps: int


def ended(folder: Path) -> Ended | None:
    """How the run ended in good order; None where it trains, was killed or gave up."""
    events = [row for row in read_events(folder) if row.get("member") == "run"]
    if not events or events[-1]["event"] != "ended":
        return None
    return Ended(str(events[-1].get("cause", "")), int(events[-1].get("step", 0)))


def wait_until_free(folder: Path, deadline: float) -> None:
    """Until no run trains in the folder: one whose sweep was killed, or whose node counts as dead,
    may still be writing its checkpoint. UniRLError at the deadline, of the monotonic clock.
    """
    while folder.exists():
        try:
            with run_lock.locked(folder):
                return
        except UniRLError as error:
            if time.monotonic() > deadline:
                raise UniRLError(
                    f"{folder} is in use: {error.rule}",
                    "a run of this sweep trains there that another sweep or node started",
                    "wait for its end, or end it with SIGTERM, then call this again",
                ) from error
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class RunProcess:
    """A run that trains in a process of this machine."""

    trial: Trial
    run: SeedRun
    process: subprocess.Popen[bytes]
    output: Path
    begin: int
    """Where in `output` this process began to write."""

    def poll(self) -> End | None:
        return None if self.process.poll() is None else End(self._failure())

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        self.process.wait()

    def _failure(self) -> str:
        """Why it failed, in a line; empty: it did not."""
        code = self.process.returncode
        if not code:
            return ""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        with self.output.open("rb") as file:
            file.seek(self.begin)
            lines = file.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return errors[-1] if errors else f"exit code {code} (see {self.output})"


@dataclass(frozen=True)
class ThisMachine:
    """Runs are processes of this machine, so many at a time."""

    sweep_dir: Path
    jobs: int

    def describe(self) -> str:
        return f"{self.jobs} at a time"

    def has_room(self, running: Sequence[Training]) -> bool:
        return len(running) < self.jobs

    def start(self, trial: Trial, run: SeedRun, pause_steps: int | None) -> RunProcess:
        num_threads = max(1, usable_cores() // self.jobs)
        return start(self.sweep_dir, trial, run, pause_steps, num_threads)

    def close(self) -> None:
        """Nothing is held."""


def start(
    sweep_dir: Path, trial: Trial, run: SeedRun, pause_steps: int | None, num_threads: int
) -> RunProcess:
    """Begin a run, or continue it. pause_steps: where it is to end before its end."""
    folder = sweep_dir / run_name(trial, run)
    pause = f"--run.pause-steps={'none' if pause_steps is None else pause_steps}"
    if (folder / "checkpoints" / "latest").exists():
        words = ["resume", str(folder), pause, "--no-console"]
    else:
        words = ["train", f"@{config_path(sweep_dir, trial)}", f"--run.seed={run.seed}", pause]
        words += [f"--runs-dir={sweep_dir}", f"--name={folder.name}", "--no-console"]
        words += ["--overwrite"] * folder.exists()  # killed before its first checkpoint
    output = sweep_dir / "logs" / f"{folder.name}.txt"
    output.parent.mkdir(exist_ok=True)
    with output.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "unirl", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=_environment(os.environ, num_threads),
            # A Ctrl-C of the terminal reaches it through the sweep.
            process_group=0,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        return RunProcess(trial, run, process, output, file.tell())


def run_name(trial: Trial, run: SeedRun) -> str:
    return f"{trial.name}-seed-{run.seed}"


def config_path(sweep_dir: Path, trial: Trial) -> Path:
    """Where the trial's whole config is."""
    return sweep_dir / "trials" / f"{trial.name}.toml"


def _environment(environ: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Runs find what this process finds, and share the cores: torch would give each all of them."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {"OMP_NUM_THREADS": str(num_threads), **environ, "PYTHONPATH": path}
