"""Faults: what happens to a training under all that we know to go wrong, one after the other and
for half an hour at random.

Each fault meets one continuing training of a step of 5 ms, with environment workers and policy
workers (appo), then with actors (impala). Measured: after how long it was noticed (a line in the
log, the end of the process), after how long all processes ran again and two more updates were
learned, and, by the next checkpoint, how many samples were lost or learned twice. A session that
was ended is started again at once with the same command.

    python benchmarks/faults.py                      # each once
    python benchmarks/faults.py --soak-minutes 30    # one every 20 s, for so long
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import measure
from fault_kinds import Kind, possible
from small_machine import folder_with_a_small_disk, small_cgroup
from training_under_faults import (
    DEADLINE_SECONDS,
    LOOK_SECONDS,
    Training,
    require,
    spread,
)

EVERY_SECONDS, CALM_SECONDS, FAULTS_BETWEEN = 20.0, 60.0, 9
MEMORY_BYTES, DISK_BYTES = 2**30, 2**30
OWN_MOUNTS = "UNIRL_FAULTS_OWN_MOUNTS"


@dataclass
class Found:
    """Of one kind of fault."""

    noticed: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    left: list[str] = field(default_factory=list)


class Trial:
    """Brings faults to a training, and keeps what was found."""

    def __init__(self, training: Training, seed: int) -> None:
        self.training, self.rng = training, random.Random(seed)
        self.found: dict[str, Found] = defaultdict(Found)
        self.lost = self.twice = self.most_log_bytes = 0
        self.failed: list[str] = []

    def try_out(self, kind: Kind) -> None:
        """Bring it and look; what does not hold is said, and again at the end."""
        try:
            self._bring(kind)
            self._look(kind)
        except RuntimeError as error:
            print(f"FAILED: {kind.name}: {error}\n{self.training.log()[-3000:]}", flush=True)
            self.failed.append(f"{kind.name}: {error}")
            self.training.begin_again()

    def _bring(self, kind: Kind) -> None:
        training, found = self.training, self.found[kind.name]
        sessions = len(training.exits)
        fault = kind.bring(training, self.rng)
        if fault.noticed is not None:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not fault.noticed():
                require(time.monotonic() < deadline, f"{kind.name}: nobody notices")
                time.sleep(LOOK_SECONDS)
            found.noticed.append(time.monotonic() - fault.at)
        training.wait_until_healthy()
        found.recovered.append(time.monotonic() - fault.at)
        for code in training.exits[sessions:]:
            require(code in kind.ends, f"{kind.name}: a session ended with {code}")

    def _look(self, kind: Kind) -> None:
        """By the next checkpoint: what was lost, learned twice, or left."""
        training, found = self.training, self.found[kind.name]
        training.wait_for_checkpoint()
        account = training.account()
        found.lost += account.lost - self.lost
        found.twice += account.twice - self.twice
        self.lost, self.twice = account.lost, account.twice
        found.left += training.left_while_it_runs()
        self.most_log_bytes = max(self.most_log_bytes, training.log_bytes())
        print(
            f"{time.strftime('%H:%M:%S')} {kind.name}: noticed {spread(found.noticed[-1:])},"
            f" recovered {spread(found.recovered[-1:])} s; {account}; left: {found.left}",
            flush=True,
        )

    def end(self) -> str:
        """End the training; what is left, in a sentence."""
        training = self.training
        training.end()
        account, left = training.account(), training.left()
        text = (
            f"{training.recipe}: {account}. Left after the end: {', '.join(left) or 'nothing'} (no"
            f" process, no program of an environment, nothing in /dev/shm, no temporary folder);"
            f" logs of processes held at most {self.most_log_bytes / 1e6:.0f} MB."
        )
        print(text, flush=True)
        self.failed += [text] if account.lost or account.twice or left else []
        return text

    def rows(self) -> list[list[object]]:
        return [
            [
                self.training.recipe,
                name,
                len(found.recovered),
                spread(found.noticed),
                spread(found.recovered),
                found.lost,
                found.twice,
                ", ".join(sorted(set(found.left))) or "nothing",
            ]
            for name, found in self.found.items()
        ]


COLUMNS = [
    "recipe", "fault", "times", "noticed after, s", "recovered after, s", "lost", "twice",
    "left over",
]  # fmt: skip


def wait_while(pause: Path | None, training: Training | None = None) -> None:
    """As long as this file exists nothing runs, and another, `.held`, beside it says so."""
    if pause is None or not pause.exists():
        return
    held = pause.with_suffix(".held")
    held.touch()
    if training is not None:
        training.stop_while(pause.exists)
    while pause.exists():
        time.sleep(LOOK_SECONDS)
    held.unlink()


@contextmanager
def trial(recipe: str, seed: int) -> Iterator[tuple[Trial, list[Kind], str]]:
    """A training that learns, the kinds of faults that it can meet, and which it cannot."""
    with (
        small_cgroup(MEMORY_BYTES) as cgroup,
        folder_with_a_small_disk(DISK_BYTES) as (folder, is_small),
    ):
        training = Training(recipe, folder, cgroup)
        kinds, refused = possible(recipe, cgroup, is_small)
        training.start()
        try:
            training.wait_until_healthy()
            training.wait_for_checkpoint()
            yield Trial(training, seed), kinds, "; ".join(refused)
        except BaseException:
            print(training.log()[-4000:], (folder / "output.txt").read_text()[-4000:])
            raise
        finally:
            for pid in training.processes():
                training.signal(pid, 9)


Outcome: TypeAlias = tuple[list[list[object]], str, list[str]]
"""Rows of the table, what is to be said below it, and what did not hold."""


def one_by_one(recipe: str, seed: int, only: str, pause: Path | None) -> Outcome:
    wait_while(pause)
    with trial(recipe, seed) as (tried, kinds, refused):
        for kind in kinds:
            if only in kind.name:
                wait_while(pause, tried.training)
                tried.try_out(kind)
        text = tried.end()
        text += f" Not tried: {refused}." if refused else ""
        return tried.rows(), text, tried.failed


class Learning(Protocol):
    """What has learned so many steps when it was read last."""

    def read(self) -> None: ...
    @property
    def steps(self) -> int: ...


class Learns(Protocol):
    """A training that says so."""

    @property
    def learned(self) -> Learning: ...


class Stretches:
    """Steps learned and seconds taken, with faults and without."""

    def __init__(self, training: Learns) -> None:
        self.training = training
        self.steps, self.seconds = Counter[bool](), Counter[bool]()

    def over(self, with_faults: bool, work: Callable[[], object]) -> None:
        """One stretch."""
        self.training.learned.read()
        started, steps = time.monotonic(), self.training.learned.steps
        work()
        self.training.learned.read()
        self.steps[with_faults] += self.training.learned.steps - steps
        self.seconds[with_faults] += time.monotonic() - started

    def rate(self, with_faults: bool) -> float:
        return self.steps[with_faults] / self.seconds[with_faults]


def soak(recipe: str, seed: int, minutes: float, pause: Path | None) -> Outcome:
    """Some minutes with a fault every 20 s, a minute without, and so on."""
    with trial(recipe, seed) as (tried, kinds, refused):
        stretches, deck, count = Stretches(tried.training), list[Kind](), 0

        def one_fault() -> None:
            began = time.monotonic()
            kind = deck.pop()
            tried.try_out(kind)
            time.sleep(max(0.0, EVERY_SECONDS - time.monotonic() + began))

        while stretches.seconds[True] < 60.0 * minutes:
            if count % FAULTS_BETWEEN == 0:
                for _ in range(int(CALM_SECONDS / EVERY_SECONDS)):
                    wait_while(pause, tried.training)
                    stretches.over(False, partial(time.sleep, EVERY_SECONDS))
            if not deck:
                deck = [kind for kind in kinds if kind.in_soak]
                tried.rng.shuffle(deck)
            wait_while(pause, tried.training)
            stretches.over(True, one_fault)
            count += 1
            rates = f"{stretches.rate(True):.0f} of {stretches.rate(False):.0f} steps/s"
            print(f"{stretches.seconds[True] / 60:.1f} minutes: {rates}", flush=True)
        text = tried.end()
        goodput = stretches.rate(True) / stretches.rate(False)
        text = (
            f"{count} faults in {stretches.seconds[True] / 60:.1f} minutes, one every"
            f" {EVERY_SECONDS:g} s, all kinds in random order: goodput **{goodput:.3f}**. That is"
            " steps learned per second, without those that a kill made it learn again, with faults"
            f" ({stretches.rate(True):,.0f}) over the same of the same run in"
            f" {stretches.seconds[False] / 60:.1f} minutes without, a minute after every"
            f" {FAULTS_BETWEEN} faults ({stretches.rate(False):,.0f}).\n\n{text}"
        )
        print(text, flush=True)
        text += f" Not tried: {refused}." if refused else ""
        return tried.rows(), text, tried.failed


def with_own_mounts() -> None:
    """Where that is allowed, start again with mounts of our own: /dev/shm is empty then."""
    if OWN_MOUNTS not in os.environ:
        own = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
        allowed = subprocess.run([*own, "true"], capture_output=True).returncode == 0
        os.environ[OWN_MOUNTS] = str(int(allowed))
        if allowed:
            os.execvp(own[0], [*own, sys.executable, *sys.argv])
    if os.environ[OWN_MOUNTS] == "1":
        subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/shm"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="0: each fault once")
    parser.add_argument("--recipe", choices=["appo", "impala"], help="this one only")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--pause-file", type=Path, help="all is stopped while this exists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    with_own_mounts()
    measure.exit_on_terminate()
    if flags.soak_minutes:
        recipe = flags.recipe or "appo"
        outcomes = [soak(recipe, flags.seed, flags.soak_minutes, flags.pause_file)]
    else:
        recipes = [flags.recipe] if flags.recipe else ["appo", "impala"]
        outcomes = [
            one_by_one(recipe, flags.seed, flags.only, flags.pause_file) for recipe in recipes
        ]
    rows = [row for outcome in outcomes for row in outcome[0]]
    body = "\n\n".join([measure.table(COLUMNS, rows), *(outcome[1] for outcome in outcomes)])
    print(body)
    failed = [what for outcome in outcomes for what in outcome[2]]
    require(not failed, "\n".join(failed))
    if not flags.no_write:
        measure.write_block("fault-soak" if flags.soak_minutes else "faults", body)


if __name__ == "__main__":
    main()
