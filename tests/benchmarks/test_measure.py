"""The benchmark harness measures what it claims to measure, and leaves nothing running."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    # benchmarks/ is a folder of scripts, not a package.
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "measure.py"
    spec = importlib.util.spec_from_file_location("measure", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CHILD = "block = bytearray({megabytes} * 10**6); print(flush=True); input()"
PARENT = """
import subprocess, sys, time
command, pipe = [sys.executable, "-c", {child!r}], subprocess.PIPE
children = [
    subprocess.Popen(command, start_new_session=new, stdin=pipe, stdout=pipe)
    for new in (False, True)
]
[child.stdout.readline() for child in children]
time.sleep(1.0)  # both hold their memory for several samples
[child.communicate(b"end") for child in children]
"""


def test_memory_of_the_whole_tree_is_counted(measure: ModuleType) -> None:
    light, heavy = (
        measure.run(
            [sys.executable, "-c", PARENT.format(child=CHILD.format(megabytes=megabytes))],
            timeout_seconds=30,
            interval_seconds=0.05,
        ).peak_memory_mb
        for megabytes in (1, 100)
    )
    assert heavy - light == pytest.approx(2 * 99, rel=0.1)


def test_cpu_time_of_reaped_children_is_counted(measure: ModuleType) -> None:
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}])\n"
        "time.sleep(0.5)"
    )
    result = measure.run([sys.executable, "-c", parent], timeout_seconds=200, interval_seconds=0.05)
    assert 0.55 <= result.cpu_seconds < 1.2  # the kernel counts in ticks of 10 ms
    assert result.cores_used(result.wall_seconds - 0.4) < 0.5


def process(
    measure: ModuleType, name: str, cpu_seconds: float, *, start_ticks: int = 1, parent: int = 1
) -> Any:
    return measure.usage.ProcessInfo(
        name=name,
        state="S",
        parent=parent,
        session=1,
        start_ticks=start_ticks,
        cpu_seconds=cpu_seconds,
    )


def test_what_each_process_spent_is_under_its_newest_name(measure: ModuleType) -> None:
    before = {
        1: process(measure, "main", 10.0),
        2: process(measure, "python", 100.0),
        3: process(measure, "child", 5.0),
        4: process(measure, "old", 7.0, parent=3),
    }
    after = {
        # Its child ran for 0.5 s more, had reaped its own, and was reaped: 12.5 are theirs.
        1: process(measure, "main", 24.0),
        2: process(measure, "ray::X", 140.0),  # took another name
        4: process(measure, "new", 2.0, start_ticks=9),  # the id of one that is gone
        5: process(measure, "ray::X", 3.0),
    }
    spent = measure.spent(before, after)
    assert spent == {"main": 2.0, "ray::X": 43.0, "new": 2.0}
    whole = measure.usage.cpu_seconds(after) - measure.usage.cpu_seconds(before)
    assert sum(spent.values()) == whole


def test_cores_by_process_add_up_to_the_cores_used_whatever_the_samples(
    measure: ModuleType,
) -> None:
    # The window is 10 s long, the samples in it are 6 s apart: the rate is that of the 6 s.
    run = measure.Run([])
    for seconds, ours, theirs in ((1.0, 0.0, 0.0), (3.0, 2.0, 1.0), (9.0, 8.0, 2.2), (20.0, 9, 9)):
        tree = {1: process(measure, "a", ours), 2: process(measure, "b", theirs)}
        run.samples.append(measure.Sample(seconds, tree, 1.0))
    cores = run.cores_by_process(2.0, 12.0)
    assert cores == pytest.approx({"a": 1.0, "b": 0.2})
    assert sum(cores.values()) == pytest.approx(run.cores_used(2.0, 12.0))
    assert run.cores_by_process(2.0, 4.0) == {}
    assert measure.core_us({"b": 0.2, "a": 1.0, "c": 0.001}, 1000.0) == {"a": 1000.0, "b": 200.0}


def test_a_run_past_its_time_is_killed_with_all_its_descendants(measure: ModuleType) -> None:
    mark = f"mark-{os.getpid()}"
    sleeper = f"import time; time.sleep(60)  # {mark}"
    parent = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-c', {sleeper!r}]\n"
        "[subprocess.Popen(command, start_new_session=new) for new in (False, True)]\n"
        "time.sleep(60)"
    )
    result = measure.run([sys.executable, "-c", parent], timeout_seconds=1.0, interval_seconds=0.1)
    assert result.timed_out
    with pytest.raises(RuntimeError, match="timed out"):
        _ = result.row
    time.sleep(0.1)
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in _command_line(pid)]


def test_it_needs_the_standard_library_alone() -> None:
    # The environments of peers have nothing of UniRL, nor what it is built on.
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import measure, os\n"
        "assert measure.usage.tree_cpu_seconds(os.getpid()) > 0\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('numpy') is None\n"
        "assert importlib.util.find_spec('envs') is None, 'the clone is off the path again'"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_last_json_object_on_standard_output_is_the_row(measure: ModuleType) -> None:
    program = """print('{"a": 1}'); print('[2]'); print('{"a": 3}'); print('goodbye')"""
    result = measure.run([sys.executable, "-c", program], timeout_seconds=30)
    assert result.row == {"a": 3}


def test_a_failed_command_shows_its_own_output(measure: ModuleType) -> None:
    result = measure.run(
        [sys.executable, "-c", "raise SystemExit('no such env')"], timeout_seconds=30
    )
    with pytest.raises(RuntimeError, match=r"exited with 1(.|\n)*no such env"):
        _ = result.row


def test_ratios_pair_the_rounds(measure: ModuleType) -> None:
    fast, slow = [{"rate": 30}, {"rate": 10}], [{"rate": 10}, {"rate": 5}]
    assert measure.ratios(fast, slow, "rate") == [3.0, 2.0]
    with pytest.raises(ValueError, match="shorter"):
        measure.ratios(fast, slow[:1], "rate")


def test_a_block_is_replaced_and_its_neighbours_stay(measure: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\n<!-- pong -->\nold\n<!-- /pong -->\n\ntail\n")
    measure.write_block("pong", "new", results=results)
    measure.write_block("cartpole", "first", results=results)
    measure.write_block("cartpole", "second", results=results)
    text = results.read_text()
    assert text.startswith("# Results\n\n<!-- pong -->\nnew\n")
    assert "old" not in text and "first" not in text
    assert text.index("tail") < text.index("second")
    assert text.count("<!-- cartpole -->") == text.count("<!-- /cartpole -->") == 1


def test_a_row_replaces_the_one_of_its_name(measure: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("<!-- speed -->\n<!-- /speed -->\ntail\n")
    for rows in ([["pong", 1], ["cartpole", 2]], [["pong", 3]], [["acrobot", 4]]):
        measure.write_rows("speed", ["name", "rate"], rows, results=results)
    lines = results.read_text().splitlines()
    assert lines[1].startswith("| name | rate | measured |")
    assert [line[: line.rindex(" | ")] for line in lines[3:6]] == [
        "| pong | 3", "| cartpole | 2", "| acrobot | 4",
    ]  # fmt: skip
    assert lines[6:] == ["<!-- /speed -->", "tail"]


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
