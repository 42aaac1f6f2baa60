"""Logs of processes are bounded, and what was printed last is there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from unirl.supervision.log_files import BoundedLogs, shorten

PRINTS = """
import sys
for i in range(50_000):
    print(f"line {i:06d}", flush=i % 50 == 0)
sys.exit("last words")
"""


def test_a_log_is_bounded_and_loses_only_what_is_oldest(tmp_path: Path) -> None:
    log, most = tmp_path / "actor-000.txt", 50_000
    aside = tmp_path / "actor-000.before.txt"
    with log.open("a") as file:
        printing = subprocess.Popen([sys.executable, "-c", PRINTS], stdout=file, stderr=file)
    while printing.poll() is None:
        shorten(log, most)
        time.sleep(1e-3)
    lines = (aside.read_text() + log.read_text()).splitlines()
    assert lines[-1] == "last words"
    numbers = [int(line.removeprefix("line ")) for line in lines[1:-1]]
    assert numbers == list(range(numbers[0], 50_000)), "some are missing in between"
    assert 0 < aside.stat().st_size + log.stat().st_size < 400_000


def test_short_logs_and_missing_ones_stay_as_they_are(tmp_path: Path) -> None:
    log = tmp_path / "actor-000.txt"
    log.write_text("short")
    logs = BoundedLogs(lambda: [tmp_path / "none.txt", log])
    logs.start()
    logs.close()
    assert [path.name for path in tmp_path.iterdir()] == ["actor-000.txt"]
    assert log.read_text() == "short"
