"""`unirl train --runner.kind ray` without an address: a cluster of its own, whose token is in no
file, and of which nothing is left when the process that trains is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.nodes import command_of, descendants, lives

pytest.importorskip("ray", reason="needs the extra ray")


def test_no_file_holds_the_token_and_nothing_is_left_when_the_process_is_killed(
    tmp_path: Path,
) -> None:
    flags = "--env.id CartPole-v1 --runner.kind ray --name own --run.total-steps 1000000000"
    command = [sys.executable, "-m", "unirl", "train", "impala", *flags.split()]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    root = Path(__file__).resolve().parents[2]
    environ["PYTHONPATH"] = os.pathsep.join([str(root), environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        rows = tmp_path / "runs" / "own" / "metrics.jsonl"
        deadline = time.monotonic() + 90.0
        while not rows.exists() or not rows.read_text():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.2)
        started = descendants(process.pid)
        names = [command_of(pid) for pid in started]
        assert any("raylet" in name for name in names), names
        (raylet,) = [pid for pid in started if "raylet/raylet " in command_of(pid)]
        environs = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
        (token,) = [one[15:] for one in environs if one.startswith(b"RAY_AUTH_TOKEN=")]
        session = next(Path("/tmp/ray").glob(f"session_*_{process.pid}"))
        files = [path for root in (tmp_path, session) for path in root.rglob("*") if path.is_file()]
        assert len(token) == 64 and len(files) > 10
        assert not [path for path in files if token in path.read_bytes()]
        assert not [pid for pid in started if token in Path(f"/proc/{pid}/cmdline").read_bytes()]
        # Ray's process of that name has to be there; like this it serves no page and no API.
        dashboards = [name for name in names if "dashboard.py" in name]
        assert all("--minimal" in name and "--disable-frontend" in name for name in dashboards)
        process.kill()
        killed = time.monotonic()
        while left := [pid for pid in started if lives(pid)]:
            assert time.monotonic() - killed < 5.0, [command_of(pid) for pid in left]
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
