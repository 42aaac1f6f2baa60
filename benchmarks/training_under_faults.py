"""A training in processes of its own, on a terminal of its own, that faults are brought to: started
again where one ended it, watched until all is as before, and looked through for what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recorded_run import CGROUP, Account, Learned, account

HERE = Path(__file__).resolve().parent
MARK = "UNIRL_FAULTS"
"""In the environment of all that a training starts, unless that drops it."""
LOOK_SECONDS, DEADLINE_SECONDS = 0.04, 300.0
HANG_SECONDS, MAKE_SECONDS, FG_SECONDS = 2.0, 4.0, 3.0
# A shell with job control, which a terminal can stop. It brings a run that was stopped to the
# foreground again, some seconds later and not before the file HOLD is gone.
SHELL = f"""
"$@" 2>> "$ERRORS"
code=$?
while [ $code = 147 ] || [ $code = 148 ]; do
    sleep {FG_SECONDS}
    while [ -e "$HOLD" ]; do sleep 0.1; done
    fg
    code=$?
done
exit $code
"""
SIZES: dict[str, dict[str, Any]] = {
    "appo": {
        "sampler.num_workers": 6,
        "sampler.num_groups": 2,
        "sampler.num_envs": 2,
        "sampler.unroll_length": 16,
        "sampler.num_policy_workers": 2,
        "queue.batch_size": 4,
        "learner.minibatches": 2,
        "learner.epochs": 1,
    },
    "impala": {
        "actor.num_actors": 4,
        "actor.num_envs": 4,
        "actor.unroll_length": 16,
        "queue.batch_size": 2,
        "queue.window": None,
    },
}
MEMBERS = {
    "appo": {"actor 0", "actor 1", *(f"env worker {i}" for i in range(6))},
    "impala": {f"actor {i}" for i in range(4)},
}


def require(held: bool, what: str) -> None:
    if not held:
        raise RuntimeError(what)


def until(held: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not held():
        require(time.monotonic() < deadline, what)
        time.sleep(LOOK_SECONDS)


def stat(pid: int) -> tuple[str, str, int] | None:
    """Name, state and parent of a process that lives."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    words = rest.split()
    return (head.partition("(")[2], words[0], int(words[1])) if words[0] not in "ZX" else None


def children(pid: int) -> Iterator[int]:
    """All below a process."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for word in path.read_text().split():
                yield int(word)
                yield from children(int(word))


def marked(root: Path) -> list[int]:
    """Processes that were started with this mark and live, but for this one."""
    wanted, found = f"{MARK}={root}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if stat(pid) and pid != os.getpid()]


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def spread(values: list[float]) -> str:
    """Median, and the longest where there are several."""
    if not values:
        return "-"
    longest = f" ({max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{longest}"


class Training:
    """One run, which continues from session to session. root: an empty folder, but for the disk of
    the run's own folder.
    """

    def __init__(self, recipe: str, root: Path, cgroup: Path | None = None) -> None:
        self.recipe, self.root, self.cgroup = recipe, root, cgroup
        self.program = f"{9_000_000 + os.getpid()}.{abs(hash(root)) % 100_000}"
        """How long the programs of its environments sleep: nothing else sleeps as long."""
        for name in ("wanted", "met", "stepped", "temp"):
            (root / name).mkdir()
        kwargs = {"folder": str(root), "program": self.program}
        settings: dict[str, Any] = {
            "recipe": recipe,
            "env.id": "unirl-bench/Faulty-v0",
            "env.import_module": "faulty_env",
            "env.engine": "sync",
            "env.kwargs": kwargs,
            "env.step_timeout": HANG_SECONDS,
            "env.make_timeout": MAKE_SECONDS,
            "policy.hidden": [32],
            "queue.max_staleness": 3,
            "runner.kind": "processes",
            "runner.learner_threads": 1,
            "runner.max_restarts": 10**6,
            "runner.hang_seconds": HANG_SECONDS,
            "run.total_steps": 10**9,
            "run.checkpoint_steps": 2_500,
            "run.log_seconds": 1.0,
            **SIZES[recipe],
        }
        (root / "settings.json").write_text(json.dumps(settings))
        self.run_dir, self.learned = root / "disk" / "run", Learned(root / "learned.txt")
        self.shell: subprocess.Popen[bytes] | None = None
        self.pid, self.pipe, self.master = 0, -1, -1
        self.exits = list[int]()

    # -- its processes -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin or continue."""
        (self.root / "pid").unlink(missing_ok=True)
        self.pid = 0
        self.master, slave = pty.openpty()
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_WAIT_POLICY": "PASSIVE",
            "TMPDIR": str(self.root / "temp"),
            MARK: str(self.root),
            "ERRORS": str(self.root / "output.txt"),
            "HOLD": str(self.root / "hold"),
        }
        if self.cgroup is not None:
            environment[CGROUP] = str(self.cgroup)
        script = [sys.executable, str(HERE / "recorded_run.py"), str(self.root)]

        def take_terminal() -> None:
            os.setsid()
            os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first one that is opened
            with contextlib.suppress(OSError):  # by itself a session has a niceness of 0
                Path("/proc/self/autogroup").write_text(str(os.nice(0)))

        self.pipe, write = os.pipe()
        self.shell = subprocess.Popen(
            ["bash", "-m", "-c", SHELL, "bash", *script],
            stdin=slave,
            stdout=write,
            stderr=slave,
            env=environment,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        os.close(write)
        threading.Thread(target=self._drain, args=(self.pipe,), daemon=True).start()
        until(lambda: (self.root / "pid").exists() or self.ended, "it does not start")
        with contextlib.suppress(ValueError, OSError):
            until(lambda: (self.root / "pid").read_text(), "no pid")
            self.pid = int((self.root / "pid").read_text())

    def _drain(self, pipe: int) -> None:
        """Read what the run prints, until the pipe is to be closed."""
        while self.pipe == pipe:
            if select.select([pipe], [], [], 0.05)[0] and not os.read(pipe, 1 << 16):
                break
        os.close(pipe)

    @property
    def ended(self) -> bool:
        """Whether this session is over."""
        # A shell whose terminal is closed does not wait.
        return self.shell is not None and self.shell.poll() is not None and not stat(self.pid)

    def clean_up(self) -> int:
        """Let go of a session that ended; its exit code."""
        assert self.shell is not None
        code = self.shell.wait(DEADLINE_SECONDS)
        if self.master >= 0:
            os.close(self.master)
        self.pipe = self.master = -1
        self.exits.append(code)
        return code

    def begin_again(self) -> None:
        """Kill what there is, and continue."""
        for pid in self.processes():
            self.signal(pid, signal.SIGKILL)
        until(lambda: self.ended, "it cannot be killed")
        self.clean_up()
        self.start()
        self.wait_until_healthy()

    def members(self) -> dict[str, int]:
        """The worker processes that there are by now, by name."""
        found = {}
        for pid in children(self.pid):
            what = stat(pid)
            if what is not None and what[0] in MEMBERS[self.recipe] and what[1] != "T":
                found[what[0]] = pid
        return found

    def helpers(self, name: str) -> list[int]:
        """The processes of this name: fork server, keeper or resource tracker."""
        if name == "fork server":
            found = stat(next(iter(self.members().values())))
            assert found is not None
            return [found[2]]
        word = {"keeper": "descendants.py", "resource tracker": "resource_tracker"}[name]
        return [pid for pid in children(self.pid) if word in command(pid)]

    def healthy(self) -> bool:
        """Whether all members run and step."""
        members, steppers = self.members(), "env worker" if self.recipe == "appo" else "actor"
        return members.keys() == MEMBERS[self.recipe] and all(
            (self.root / "stepped" / str(pid)).exists()
            for name, pid in members.items()
            if name.startswith(steppers)
        )

    def wait_until_healthy(self) -> None:
        """All is as before, and two updates were learned since; a session that ended is followed by
        another.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.healthy():
            require(time.monotonic() < deadline, f"it does not recover: {self.members()}")
            if self.ended:
                self.clean_up()
                self.start()
            time.sleep(LOOK_SECONDS)
        self.learned.read()
        since = len(self.learned.updates)

        def learned() -> bool:
            self.learned.read()
            return len(self.learned.updates) >= since + 2

        until(lambda: learned() or self.ended, "it does not learn")
        if self.ended:
            self.wait_until_healthy()

    def signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def stop_while(self, held: Callable[[], bool]) -> None:
        """Stop all of it meanwhile, as Ctrl-Z does."""
        hold = self.root / "hold"
        hold.touch()
        os.killpg(os.getpgid(self.pid), signal.SIGSTOP)
        while held():
            time.sleep(LOOK_SECONDS)
        hold.unlink()
        until(lambda: (stat(self.pid) or ("", "T", 0))[1] != "T", "fg does not continue it")
        self.wait_until_healthy()

    def log(self) -> str:
        """What the run has logged so far."""
        with contextlib.suppress(OSError):
            return (self.run_dir / "log.txt").read_text(errors="replace")
        return ""

    def ask(self, name: str) -> None:
        """Want the next environment to do this."""
        (self.root / "met" / name).unlink(missing_ok=True)
        (self.root / "wanted" / name).touch()

    def met(self, name: str) -> tuple[int, float]:
        """The process that did it, and when."""
        path = self.root / "met" / name
        until(lambda: path.exists() and len(path.read_text().split()) == 2, f"nothing met {name}")
        pid, moment = path.read_text().split()
        return int(pid), float(moment)

    # -- what it leaves ----------------------------------------------------------------------------

    def programs(self) -> list[int]:
        """What its environments started and nothing ended."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [p for p in pids if stat(p) and command(p) == f"sleep {self.program} "]

    def processes(self) -> list[int]:
        """All that bear its mark, programs included."""
        found = {*marked(self.root), *self.programs()}
        return [pid for pid in found if stat(pid) and pid != os.getpid()]

    def left_while_it_runs(self) -> list[str]:
        """Processes that belong to no member: of members that are gone."""
        assert self.shell is not None
        members, programs = self.members(), self.programs()
        known = {self.shell.pid, self.pid, *children(self.pid), *programs}
        found = [f"process {command(p)[:60]}" for p in self.processes() if p not in known]
        # Policy workers make an environment too, to see its spaces.
        if (more := len(programs) - 2 * len(members)) > 0:
            found.append(f"{more} programs")
        return found

    def left(self, seconds: float = 10.0) -> list[str]:
        """After the end: processes, temporary folders and segments that are there still."""
        with contextlib.suppress(RuntimeError):
            until(lambda: not self.processes(), "", seconds)
        found = [f"process {command(pid)[:60]}" for pid in self.processes()]
        found += [f"temporary {path.name}" for path in (self.root / "temp").iterdir()]
        return found + [f"shared memory {name}" for name in os.listdir("/dev/shm")]

    def account(self) -> Account:
        """Of the newest checkpoint."""
        return account(self.run_dir, self.learned)

    def wait_for_checkpoint(self) -> None:
        """One that is newer than what is learned by now."""
        self.learned.read()
        wanted, latest = self.learned.steps, self.run_dir / "checkpoints" / "latest"

        def newest() -> int:
            return int(latest.resolve().name.partition("_")[2]) if latest.exists() else 0

        until(lambda: self.ended or newest() > wanted, "no checkpoint is written")

    def log_bytes(self) -> int:
        """Of all that processes wrote to logs."""
        return sum(path.stat().st_size for path in (self.run_dir / "logs").glob("*"))

    def end(self) -> None:
        """In good order."""
        self.signal(self.pid, signal.SIGTERM)
        until(lambda: self.ended, "it does not end")
        self.clean_up()
