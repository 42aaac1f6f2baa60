"""What can happen to a training, each in a function: it brings the fault about and says when that
was, and how one sees that it was noticed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from training_under_faults import HANG_SECONDS, Training, require, stat, until

ALL = ("appo", "impala")


@dataclass(frozen=True)
class Fault:
    """One that was brought about."""

    at: float
    """When, on the monotonic clock."""
    noticed: Callable[[], bool] | None
    """None: there is nothing to notice."""


Bring = Callable[[Training, random.Random], Fault]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    bring: Bring
    recipes: tuple[str, ...] = ("appo",)
    ends: tuple[int, ...] = ()
    """The exit codes that a session may end with; empty: it continues."""
    in_soak: bool = True


def member(training: Training, role: str, rng: random.Random) -> tuple[str, int]:
    found = {name: pid for name, pid in training.members().items() if name.startswith(role)}
    return rng.choice(sorted(found.items()))


def logged(training: Training, pattern: str) -> Callable[[], bool]:
    """Whether a line of the log has said so from now on."""
    start = len(training.log())
    return lambda: re.search(pattern, training.log()[start:]) is not None


def signal_member(role: str, number: int, training: Training, rng: random.Random) -> Fault:
    name, pid = member(training, role, rng)
    noticed = logged(training, f"{name.replace('env', 'environment')} (died|was killed)")
    at = time.monotonic()
    training.signal(pid, number)
    return Fault(at, noticed)


def signal_main(number: int, training: Training, rng: random.Random) -> Fault:
    at = time.monotonic()
    training.signal(training.pid, number)
    return Fault(at, lambda: training.ended)


def signal_helper(name: str, number: int, training: Training, rng: random.Random) -> Fault:
    said = {"fork server": DIED, "keeper": "keeper was ended"}.get(name)
    noticed = logged(training, said) if said else None
    pids, at = training.helpers(name), time.monotonic()
    for pid in pids:
        training.signal(pid, number)
    if name == "fork server" and number == signal.SIGSTOP:
        return Fault(at, lambda: (stat(pids[0]) or ("", "", 0))[1] != "T")
    return Fault(at, noticed)


def type_keys(keys: bytes, training: Training, rng: random.Random) -> Fault:
    at = time.monotonic()
    for number in range(len(keys)):
        if number:
            time.sleep(0.1)
        os.write(training.master, keys[number : number + 1])
    return Fault(at, lambda: training.ended)


def stop_and_fg(training: Training, rng: random.Random) -> Fault:
    os.write(training.master, b"\x1a")
    until(lambda: (stat(training.pid) or ("", "", 0))[1] == "T", "Ctrl-Z does not stop it")
    until(lambda: (stat(training.pid) or ("", "T", 0))[1] != "T", "fg does not continue it")
    return Fault(time.monotonic(), None)


def sleep(seconds: float, training: Training, rng: random.Random) -> Fault:
    """As a laptop does that is closed; nobody may be judged hung for it."""
    start, at = len(training.log()), time.monotonic() + seconds
    training.stop_while(lambda: time.monotonic() < at)
    time.sleep(2 * HANG_SECONDS + 1.0)
    said = training.log()[start:]
    require("killed" not in said and "died" not in said, f"judged for having slept:\n{said}")
    return Fault(at, None)


def close_terminal(training: Training, rng: random.Random) -> Fault:
    at = time.monotonic()
    os.close(training.master)
    training.master = -1
    return Fault(at, lambda: training.ended)


def close_pipe(training: Training, rng: random.Random) -> Fault:
    noticed, at = logged(training, "the console is gone"), time.monotonic()
    if training.pipe < 0:
        return Fault(at, None)  # it was closed before, in this session
    training.pipe = -1  # its reader closes it
    return Fault(at, noticed)


def ask(name: str, said: str, training: Training, rng: random.Random) -> Fault:
    noticed = logged(training, said) if said else None
    training.ask(name)
    return Fault(training.met(name)[1], noticed)


def ends_by(name: str, training: Training, rng: random.Random) -> Fault:
    training.ask(name)
    return Fault(training.met(name)[1], lambda: training.ended)


def hang_while_made(training: Training, rng: random.Random) -> Fault:
    noticed = logged(training, "was not made within")
    training.ask("hang while it is made")
    role = "env worker" if training.recipe == "appo" else "actor"
    training.signal(member(training, role, rng)[1], signal.SIGKILL)
    return Fault(training.met("hang while it is made")[1], noticed)


def start_programs(training: Training, rng: random.Random) -> Fault:
    """And then its process is killed."""
    training.ask("starts programs with setsid")
    pid, _ = training.met("starts programs with setsid")
    before, at = set(training.programs()), time.monotonic()
    training.signal(pid, signal.SIGKILL)
    return Fault(at, lambda: len(before - set(training.programs())) >= 4)


def print_much(training: Training, rng: random.Random) -> Fault:
    since, at = time.time(), ask("prints without end", "", training, rng).at

    def shortened() -> bool:
        found = (training.run_dir / "logs").glob("*.before.txt")
        return any(path.stat().st_mtime > since for path in found)

    return Fault(at, shortened)


def second_run(training: Training, rng: random.Random) -> Fault:
    at = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "unirl", "resume", str(training.run_dir), "--no-console"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    require(done.returncode == 2 and "is in use" in done.stderr, done.stdout + done.stderr)
    return Fault(at, lambda: True)


def fill_disk(training: Training, rng: random.Random) -> Fault:
    path = training.root / "disk" / "filler"
    at = time.monotonic()
    with path.open("wb") as file:
        free = os.statvfs(path.parent)
        os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail - 1) * free.f_frsize)
    until(lambda: training.ended, "a full disk does not end it")
    noticed = time.monotonic()
    path.unlink()
    require("disk full" in (training.root / "output.txt").read_text(), "it does not say why")
    return Fault(at, lambda: time.monotonic() >= noticed)


WORKER, DIED = "env worker", "(actor|worker) . (died|was killed)"
KINDS = (
    Kind("terminal closed", close_terminal, ALL, (0, -signal.SIGHUP)),
    Kind("pipe of the output closed", close_pipe),
    Kind("SIGHUP", partial(signal_main, signal.SIGHUP), ends=(0,)),
    Kind("SIGTERM", partial(signal_main, signal.SIGTERM), ALL, (0,)),
    Kind("SIGQUIT", partial(signal_main, signal.SIGQUIT), ends=(131,)),
    Kind("Ctrl-C", partial(type_keys, b"\x03"), ends=(0,)),
    Kind("Ctrl-C twice within 0.1 s", partial(type_keys, b"\x03\x03"), ends=(0, 130)),
    Kind("Ctrl-Z, and fg after 3 s", stop_and_fg, ALL),
    Kind("kill -9 of the main process", partial(signal_main, signal.SIGKILL), ALL, (137,)),
    Kind("kill -9 of an actor", partial(signal_member, "actor", signal.SIGKILL), ("impala",)),
    Kind("kill -9 of a policy worker", partial(signal_member, "actor", signal.SIGKILL)),
    Kind("kill -9 of an environment worker", partial(signal_member, WORKER, signal.SIGKILL)),
    Kind("kill -9 of the fork server", partial(signal_helper, "fork server", signal.SIGKILL), ALL),
    Kind("kill -9 of the keeper", partial(signal_helper, "keeper", signal.SIGKILL)),
    Kind(
        "kill -9 of the resource tracker",
        partial(signal_helper, "resource tracker", signal.SIGKILL),
    ),
    Kind("SIGSTOP of an actor", partial(signal_member, "actor", signal.SIGSTOP), ("impala",)),
    Kind("SIGSTOP of a policy worker", partial(signal_member, "actor", signal.SIGSTOP)),
    Kind("SIGSTOP of an environment worker", partial(signal_member, WORKER, signal.SIGSTOP)),
    Kind("SIGSTOP of the fork server", partial(signal_helper, "fork server", signal.SIGSTOP), ALL),
    Kind("SIGSTOP of who holds the queue's lock", partial(ask, "stops with the lock", DIED), ALL),
    Kind("environment hangs in a step", partial(ask, "hang in a step", DIED), ALL),
    Kind("environment hangs while it is made", hang_while_made, ALL),
    Kind("environment starts programs with setsid, killed", start_programs, ALL),
    Kind("environment prints without end", print_much, ALL),
    Kind("environment raises", partial(ask, "an exception", DIED), ALL),
    Kind("environment calls sys.exit", partial(ask, "sys.exit", DIED), ALL),
    Kind(
        "environment returns None as terminated", partial(ends_by, "None as terminated"), ALL, (2,)
    ),
    Kind("a second run in the folder", second_run),
    # On a slow machine its step takes too long before memory runs out.
    Kind("out of memory in a cgroup", partial(ask, "eats memory", f"memory ran out|{DIED}"), ALL),
    Kind("disk full", fill_disk, ALL, (2,)),
    Kind("all stopped for 90 s, as a laptop that sleeps", partial(sleep, 90.0), ALL, in_soak=False),
)


def possible(recipe: str, cgroup: Path | None, is_small: bool) -> tuple[list[Kind], list[str]]:
    """The kinds that can be tried here, and why others cannot."""
    refused = {}
    if cgroup is None:
        refused["out of memory in a cgroup"] = "no cgroup can be made here"
    if not is_small:
        refused["disk full"] = "nothing can be mounted here"
    kinds = [kind for kind in KINDS if recipe in kind.recipes and kind.name not in refused]
    return kinds, [f"{name}: {why}" for name, why in refused.items()]
