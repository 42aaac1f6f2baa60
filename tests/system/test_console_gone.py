"""The console goes away, and the run does not: it continues, or ends with a checkpoint and with all
of its processes, as the signal says.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forked
from unirl import cli
from unirl.storage.checkpoint import load_checkpoint

ROOT = Path(cli.__file__).resolve().parent.parent
TRAIN = ["train", "impala", "--env.id", "CartPole-v1"]
TRAIN += ["--actor.num-envs", "4", "--actor.num-actors", "1", "--policy.hidden", "[8]"]
TRAIN += ["--runner.learner-threads", "1", "--run.log-seconds", "0.2", "--run.total-steps"]


def wait_until(done: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def session(leader: int) -> set[int]:
    """The processes of a session that run."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == leader and state not in "ZX":
                    found.add(int(entry.name))
    return found


def on_terminal_of(name: str, ignore: tuple[int, ...], words: list[str]) -> int:
    """A command on a terminal of its own, in a process without one that leads its session."""
    # As nohup does, and a shell with what is in its background; the tests may run so, too.
    for number in (signal.SIGHUP, signal.SIGQUIT, *ignore):
        signal.signal(number, signal.SIG_IGN if number in ignore else signal.SIG_DFL)
    terminal = os.open(name, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(terminal, stream)
    for text in (sys.stdout, sys.stderr):
        assert isinstance(text, io.TextIOWrapper)
        text.reconfigure(line_buffering=True)
    return cli.main(words)


class OnTerminal:
    """A training on a terminal of its own, whose screen is read all the time."""

    def __init__(self, folder: Path, *flags: str, ignore: tuple[int, ...] = ()) -> None:
        self.run = folder / "runs/x"
        self.master, slave = pty.openpty()
        words = [*TRAIN, "1e9", "--name", "x", "--runs-dir", str(folder / "runs"), *flags]
        self.process = forked.start(
            on_terminal_of, os.ttyname(slave), ignore, words, environ={"TERM": "xterm-256color"}
        )
        os.close(slave)
        assert self.process.pid is not None
        self.pid = self.process.pid
        os.set_blocking(self.master, False)

    @property
    def exit_code(self) -> int | None:
        return self.process.exitcode

    def wait_for_rows(self, more: int = 1) -> None:
        """Until so many more rows of metrics are written."""
        wanted = self.num_rows() + more
        wait_until(lambda: self.num_rows() >= wanted, "no row of metrics was written")

    def num_rows(self) -> int:
        with contextlib.suppress(OSError):
            os.read(self.master, 1 << 20)  # a screen that nobody reads would block the run
        metrics = self.run / "metrics.jsonl"
        assert not self.has_ended(), f"ended with {self.exit_code}"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def close_terminal(self) -> None:
        os.close(self.master)
        self.master = -1

    def has_ended(self) -> bool:
        return self.exit_code is not None

    def wait_for_end(self) -> None:
        wait_until(self.has_ended, "the run did not end")
        wait_until(lambda: not session(self.pid), "processes of the run are left")

    def kill(self) -> None:
        for pid in session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(self.has_ended, "a killed run did not end")
        if self.master >= 0:
            os.close(self.master)


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Callable[..., OnTerminal]]:
    started: list[OnTerminal] = []

    def start(*flags: str, ignore: tuple[int, ...] = ()) -> OnTerminal:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(OnTerminal(folder, *flags, ignore=ignore))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_a_closed_terminal_ends_a_run_with_a_checkpoint(
    on_terminal: Callable[..., OnTerminal],
) -> None:
    runs = [on_terminal("--runner.kind", kind) for kind in ("inline", "processes")]
    for run in runs:
        run.wait_for_rows()
        run.close_terminal()
    for run in runs:
        run.wait_for_end()
        assert run.exit_code == 0
        assert load_checkpoint(run.run).step > 0
        log = (run.run / "log.txt").read_text()
        assert "ended: interrupted" in log and "died" not in log


def test_under_nohup_a_closed_terminal_changes_nothing_and_sigquit_ends_all(
    on_terminal: Callable[..., OnTerminal],
) -> None:
    flags = ("--runner.kind", "processes", "--run.checkpoint-steps", "200")
    run = on_terminal(*flags, ignore=(signal.SIGHUP, signal.SIGQUIT))
    run.wait_for_rows()
    run.close_terminal()
    log = run.run / "log.txt"
    gone = "the console is gone (Input/output error); training continues"
    wait_until(lambda: gone in log.read_text() or run.has_ended(), "it was not noticed")
    run.wait_for_rows(2)
    assert " step=" in log.read_text() and "died" not in log.read_text()
    assert len(session(run.pid)) > 1
    os.kill(run.pid, signal.SIGQUIT)
    run.wait_for_end()
    assert run.exit_code == -signal.SIGQUIT


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "unirl", *TRAIN, "4e3", "--name", "x", "--run.target-window", "10"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("defaults")
        process.stdout.close()
        assert process.wait(90) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
    assert load_checkpoint(tmp_path / "runs/x").step >= 4_000
    rows = [json.loads(line) for line in (tmp_path / "runs/x/metrics.jsonl").open()]
    assert rows[-1]["step"] >= 4_000
    assert f"step={rows[-1]['step']}/4000" in (tmp_path / "runs/x/log.txt").read_text()
