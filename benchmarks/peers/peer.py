"""What every peer's run.py shares: an environment of the peer's own, the clock, and the JSON row.

The script runs twice. Outside, under any Python, it makes `.venv` beside itself from
requirements.txt, starts itself again inside, and weighs that process tree. Inside, it trains the
peer and prints the row. Standard library only, as the inside is the peer's, not UniRL's.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import measure  # noqa: E402  (benchmarks/ is a folder of scripts, not a package)

# The folders here bear the names of packages: left on the path, they would be taken for them.
sys.path[:] = [entry for entry in sys.path if entry not in (str(HERE), str(HERE.parent))]

Settings = dict[str, Any]
START_UP_SECONDS = 180.0
"""How long a peer may take besides the time it is asked to train: to start, and to stop."""


class Clock:
    """Counts what is learned in `seconds`, from `warm_up_seconds` after the first update.

    Call `done` after each update with the decisions learned from so far; true: stop training.
    """

    def __init__(self, seconds: float, warm_up_seconds: float) -> None:
        self._seconds, self._warm_up_seconds = seconds, warm_up_seconds
        self._first_update: float | None = None
        self._start: tuple[float, int, measure.Tree] | None = None
        self._end: tuple[float, int, measure.Tree] | None = None

    def done(self, num_steps: int) -> bool:
        """num_steps: distinct decisions that some update has used, since the start."""
        now = time.monotonic()
        if num_steps <= 0 or self._end is not None:
            return self._end is not None
        if self._first_update is None:
            self._first_update = now
        if self._start is None:
            if now - self._first_update >= self._warm_up_seconds:
                self._start = self._mark(now, num_steps)
        elif now - self._start[0] >= self._seconds:
            self._end = self._mark(now, num_steps)
        return self._end is not None

    @property
    def figures(self) -> dict[str, Any]:
        """The part of the row that was measured; RuntimeError where training ended before."""
        if self._start is None or self._end is None:
            raise RuntimeError("the peer stopped before the time was over")
        seconds = self._end[0] - self._start[0]
        steps = self._end[1] - self._start[1]
        used = measure.spent(self._start[2], self._end[2])
        cores = {name: cpu_seconds / seconds for name, cpu_seconds in used.items()}
        return {
            "env_steps_per_second": round(steps / seconds, 1),
            "cores_used": round(sum(cores.values()), 2),
            "core_us_per_env_step": measure.core_us(cores, steps / seconds),
            "seconds": round(seconds, 2),
            "steps": steps,
        }

    def _mark(self, now: float, num_steps: int) -> tuple[float, int, measure.Tree]:
        return now, num_steps, measure.usage.tree(os.getpid())


@dataclass(frozen=True)
class Peer:
    """One system to compare with."""

    script: Path
    """Its run.py."""
    name: str
    """As it stands in tables, with the version."""
    presets: Mapping[str, Settings]
    """What it runs by environment; `--set KEY=VALUE` changes one value."""
    passes: str
    """The setting that says how often each decision goes through backward."""
    train: Callable[[str, Settings, Clock, Path], str]
    """Trains until the clock is done, in a temporary folder; returns its settings in words."""
    candidates: Mapping[str, Sequence[Settings]] = field(default_factory=dict)
    """By environment: changes to the preset that might be faster; `--try` runs them all."""
    finish_install: Callable[[Path], None] | None = None
    """What pip alone cannot do; is given .venv."""
    environment: Mapping[str, str] | None = None
    """Environment variables of the inside."""

    def main(self, doc: str) -> None:
        """The command line of run.py."""
        parser = argparse.ArgumentParser(description=doc.splitlines()[0])
        parser.add_argument("--env", choices=self.presets, default=next(iter(self.presets)))
        parser.add_argument("--seconds", type=float, default=60.0)
        parser.add_argument(
            "--warm-up-seconds", type=float, default=10.0, help="counted from the first update"
        )
        parser.add_argument(
            "--json", action="store_true", help="print one line of JSON and nothing else"
        )
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override the preset"
        )
        parser.add_argument("--install", action="store_true", help="make .venv and stop")
        parser.add_argument(
            "--try",
            action="store_true",
            dest="try_all",
            help="run preset and candidates in turn, and name the fastest",
        )
        parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
        flags = parser.parse_args()
        if flags.inside:
            self._inside(flags)
            return
        self._install()
        if flags.install:
            return
        measure.exit_on_terminate()
        if flags.try_all:
            self._try(flags)
            return
        row = self._weighed(flags, flags.set)
        print(
            json.dumps(row)
            if flags.json
            else "\n".join(f"{key}: {value}" for key, value in row.items())
        )

    def _inside(self, flags: argparse.Namespace) -> None:
        settings = {**self.presets[flags.env]}
        for text in flags.set:
            key, _, value = text.partition("=")
            if key not in settings:
                raise SystemExit(f"no setting {key!r}; there are {', '.join(sorted(settings))}")
            settings[key] = _value(value)
        clock = Clock(flags.seconds, flags.warm_up_seconds)
        passes = settings[self.passes]
        try:
            words = self.train(flags.env, settings, clock, flags.inside)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # at once: threads of the peer would wait for work that never comes
        row = {
            "system": self.name,
            "env": flags.env,
            "passes": passes,
            **clock.figures,
            "settings": words,
        }
        print(json.dumps(row), flush=True)

    def _try(self, flags: argparse.Namespace) -> None:
        rates: dict[str, float] = {}
        for candidate in ({}, *self.candidates.get(flags.env, ())):
            changes = [f"{key}={value}" for key, value in candidate.items()]
            row = self._weighed(flags, [*flags.set, *changes])
            rates[" ".join(changes) or "preset"] = row["env_steps_per_second"]
            print(json.dumps(row), flush=True)
        print(f"fastest: {max(rates, key=lambda name: rates[name])}")

    def _weighed(self, flags: argparse.Namespace, changes: Sequence[str]) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix="peer-"))
        try:
            command = [str(self._venv / "bin" / "python"), str(self.script)]
            command += ["--env", flags.env, "--seconds", str(flags.seconds)]
            command += ["--warm-up-seconds", str(flags.warm_up_seconds)]
            for change in changes:
                command += ["--set", change]
            result = measure.run(
                [*command, "--inside", str(folder)],
                timeout_seconds=flags.seconds + flags.warm_up_seconds + START_UP_SECONDS,
                environment={"PYTHONWARNINGS": "ignore", **(self.environment or {})},
                cwd=folder,  # some peers leave files where they are started
            )
            return {**result.row, "peak_memory_mb": round(result.peak_memory_mb, 1)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _venv(self) -> Path:
        return self.script.parent / ".venv"

    def _install(self) -> None:
        """Make the environment once; a mark written last says that it is whole."""
        requirements = self.script.parent / "requirements.txt"
        wanted, mark = requirements.read_text(), self._venv / "requirements.installed"
        if mark.exists() and mark.read_text() == wanted:
            return
        print(f"installing {self.name} into {self._venv} (some minutes, once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self._venv)], check=True)
        pip(self._venv, ["-r", str(requirements)])
        if self.finish_install is not None:
            self.finish_install(self._venv)
        mark.write_text(wanted)


def pip(venv: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """`pip install` with the environment's own pip; what it prints goes to standard error."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", *arguments]
    subprocess.run(
        command, check=True, stdout=sys.stderr, env={**os.environ, **(environment or {})}
    )


def check_sha256(path: Path, wanted: str) -> None:
    """Refuse a download that is not the file that was tried."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wanted:
        raise SystemExit(f"{path.name} has SHA-256 {found}, expected {wanted}")


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)
