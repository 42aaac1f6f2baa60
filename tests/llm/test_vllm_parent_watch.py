"""A process of an engine ends with its owner, also where the kernel does not let it wait for it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from unirl.llm.weights.process import is_running, start_time

_WATCHED = """
import errno, os, sys, time
from unirl.llm.engines.vllm.parent_watch import watch_owner
def forbidden(pid, flags=0):
    raise PermissionError(errno.EPERM, "Operation not permitted")
if sys.argv[1] == "forbidden":
    os.pidfd_open = forbidden
watch_owner()
print(os.getpid(), flush=True)
time.sleep(60)
"""
_OWNER = """
import os, subprocess, sys, time
from unirl.llm.engines.vllm.parent_watch import OWNER, owner_tag
command = [sys.executable, sys.argv[1], sys.argv[2]]
subprocess.Popen(command, env=os.environ | {OWNER: owner_tag()})
time.sleep(60)
"""


@pytest.mark.parametrize("pidfd", ["allowed", "forbidden"])
def test_a_process_lives_as_long_as_its_owner(pidfd: str, tmp_path: Path) -> None:
    script = tmp_path / "watched.py"
    script.write_text(_WATCHED)
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(script), pidfd],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("w"),
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        began = start_time(pid)
        time.sleep(1.2)  # longer than it takes to look
        alive = is_running(pid, began)
        owner.kill()
        owner.wait()
        end = time.monotonic() + 10
        while is_running(pid, began) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(pid, began)
    assert alive
    logged = (tmp_path / "log").read_text()
    assert ("cannot be waited for" in logged) == (pidfd == "forbidden")
