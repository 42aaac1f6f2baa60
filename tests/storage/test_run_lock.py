"""The lock of a run folder: one holder at a time, and no process keeps it for one that is gone."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unirl import storage
from unirl.errors import UniRLError
from unirl.storage.run_lock import NAME, locked

ROOT = Path(storage.__file__).resolve().parent.parent.parent

# Holds the lock, and has a fork that lives on.
HOLDER = """
import os, sys, time
from pathlib import Path
from unirl.storage.run_lock import locked
with locked(Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # the fork itself: it may begin late
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def test_the_second_is_refused_in_three_parts_that_name_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    with locked(folder):
        with pytest.raises(UniRLError) as refused, locked(folder):
            pass
        assert len(refused.value.parts) == 3
        for part in (str(folder), f"process {os.getpid()} on host {os.uname().nodename}", "kill"):
            assert part in str(refused.value)
        (folder / "config.toml").write_text("")
    with locked(folder):
        pass
    assert os.listdir(folder) == ["config.toml"]


def test_a_folder_in_which_no_run_began_is_not_left_behind(tmp_path: Path) -> None:
    with locked(tmp_path / "x"):
        pass
    assert not (tmp_path / "x").exists()


def test_a_fork_of_a_killed_run_does_not_keep_its_folder_locked(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(UniRLError, match=f"process {process.pid} "), locked(tmp_path):
            pass
        process.kill()
        process.wait(10)
        os.kill(child, 0)  # it lives
        with locked(tmp_path):
            pass
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
    assert not (tmp_path / NAME).exists()


def test_of_many_that_start_at_once_one_has_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    inside, most, entered = [0], [0], [0]

    def start() -> None:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            try:
                with locked(folder):
                    inside[0] += 1
                    entered[0] += 1
                    most[0] = max(most[0], inside[0])
                    time.sleep(0.0005)
                    inside[0] -= 1
            except UniRLError:
                time.sleep(0.0001)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most[0] == 1 and entered[0] > 8


def test_a_file_system_without_locks_is_a_warning_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), locked(tmp_path), locked(tmp_path):
        assert "this file system has no locks (No locks available)" in caplog.text
