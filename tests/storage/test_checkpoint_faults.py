"""Checkpoints of processes that die, of full disks and beside readers: whole or absent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.saving import save
from unirl.core.tree import leaves
from unirl.storage.checkpoint import latest, list_checkpoints, load_checkpoint


class Forks:
    """Runs code in forks of one process that has imported everything, one at a time."""

    SERVER = """
import json, os, shutil, signal, sys, torch
from itertools import count
from pathlib import Path
from unirl.errors import UniRLError
from unirl.storage.checkpoint import latest, save_checkpoint
for line in sys.stdin:
    child = os.fork()
    if not child:
        signal.alarm(60)  # whatever becomes of the test
        exec(json.loads(line))
        sys.stdout.flush()
        os._exit(0)
    print(child, flush=True)
    status = os.waitpid(child, 0)[1]
    print("exit", os.waitstatus_to_exitcode(status), flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, code: str) -> int:
        """The id of the process that runs it; what it prints comes after that."""
        assert self._process.stdin is not None
        print(json.dumps(code), file=self._process.stdin, flush=True)
        return int(self._line())

    def finish(self) -> tuple[int, list[str]]:
        """Exit code and output of the one that was started last."""
        lines = [self._line()]
        while not lines[-1].startswith("exit "):
            lines.append(self._line())
        return int(lines[-1].removeprefix("exit ")), lines[:-1]

    def kill(self, process: int) -> None:
        os.kill(process, signal.SIGKILL)
        assert self.finish()[0] == -signal.SIGKILL

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process is gone"
        return line.rstrip("\n")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.mark.parametrize("limit", [100, 5_000, 50_000, 99_000])
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_half(
    tmp_path: Path, forks: Forks, limit: int
) -> None:
    save(tmp_path, 1)
    # The kernel refuses to grow a file beyond the limit, as it does on a full disk.
    forks.start(f"""
import resource
tree = {{"small": torch.zeros(500), "large": torch.zeros(25_000)}}
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    save_checkpoint(Path({str(tmp_path)!r}), 2, model=tree, optimizer=tree, state={{}}, keep=1)
except UniRLError as error:
    print(*error.parts, sep="\\n", flush=True)
    os._exit(2)
""")
    code, output = forks.finish()
    assert code == 2
    what, rule, remedy = output
    assert what.startswith("disk full") and str(tmp_path) in what
    assert "204,000 bytes" in rule and "step_00000001 is intact" in remedy
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step_00000001"]
    assert load_checkpoint(tmp_path).step == 1


# Saves checkpoints as fast as it can, until killed.
WRITER = """
root, keep = Path({root!r}), {keep}
newest = latest(root)
# The first save replaces the step that `latest` names.
for step in count(int(newest.name.removeprefix("step_")) if newest else 0):
    tree = {{str(i): torch.full((20_000,), float(step)) for i in range(8)}}
    save_checkpoint(root, step, model=tree, optimizer=tree, state={{"step": step}}, keep=keep)
"""


def test_a_writer_killed_at_any_moment_leaves_every_checkpoint_readable(
    tmp_path: Path, forks: Forks
) -> None:
    rng = random.Random(0)
    last_step = -1
    for kill_index in range(20):
        before, writer = latest(tmp_path), forks.start(WRITER.format(root=str(tmp_path), keep=2))
        deadline = time.monotonic() + 60
        # Every other one is killed after it finished a save, the others maybe amid their first.
        while kill_index % 2 and latest(tmp_path) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.1))
        forks.kill(writer)
        for path in list_checkpoints(tmp_path):
            checkpoint = load_checkpoint(path)
            values = {value for _, leaf in leaves(checkpoint.model) for value in leaf.tolist()}
            assert values == {float(checkpoint.step)} == {checkpoint.state["step"]}
        if last_step >= 0 or latest(tmp_path) is not None:
            newest = load_checkpoint(tmp_path).step
            assert newest >= last_step, "a finished checkpoint was lost"
            last_step = newest
    assert last_step >= 10, "no writer lived long enough to test anything"
    save(tmp_path, last_step + 1)
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]


# Saves again and again, in children of which each dies one file operation later.
DYING_WRITERS = """
start, step, keep = Path({start!r}), {step}, {keep}
num_left = 0

def die(event, arguments):
    global num_left
    if event in ("os.rename", "os.symlink", "os.mkdir", "os.rmdir", "os.remove", "open"):
        num_left -= 1
        if num_left < 0:
            os._exit(9)

for number in range(1000):
    root = start.with_name(f"killed-{{number}}")
    shutil.copytree(start, root, symlinks=True)
    child = os.fork()
    if not child:
        num_left = number
        sys.addaudithook(die)
        tree = {{"x": torch.full((9,), float(step))}}
        save_checkpoint(root, step, model=tree, optimizer=tree, state={{"new": True}}, keep=keep)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(number)
"""


@pytest.mark.parametrize(
    ("before", "step", "keep"),
    [((), 1, 3), ((1, 2, 3), 4, 1), ((1, 9, 2), 3, 3), ((1, 2), 2, 2), ((2,), 2, 1)],
    ids=["first", "prune", "rewound", "replace", "replace-only"],
)
def test_death_before_any_single_file_operation_loses_nothing(
    tmp_path: Path, forks: Forks, before: tuple[int, ...], step: int, keep: int
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    for earlier in before:
        save(start, earlier)
    forks.start(DYING_WRITERS.format(start=str(start), step=step, keep=keep))
    code, output = forks.finish()
    assert code == 0
    num_operations = int(output[0])
    assert num_operations > 5
    had_new = False
    for number in range(num_operations + 1):
        root = tmp_path / f"killed-{number}"
        complete = list_checkpoints(root)
        visible = sorted((root / "checkpoints").glob("step_*"))
        assert set(visible) <= set(complete), "a half checkpoint bears a checkpoint's name"
        for path in complete:
            checkpoint = load_checkpoint(path)
            assert checkpoint.model[next(iter(checkpoint.model))].unique() == checkpoint.step
        if before or latest(root) is not None:
            newest = load_checkpoint(root)
            assert newest.step in (*before[-1:], step)
            has_new = "new" in newest.state
            assert has_new or not had_new, "a later death left an older checkpoint"
            had_new = has_new
        save(root, step + 1)
        assert load_checkpoint(root).step == step + 1
        names = os.listdir(root / "checkpoints")
        assert not [name for name in names if name.startswith(".")]
    assert had_new


def test_a_reader_beside_a_writer_always_finds_a_whole_checkpoint(
    tmp_path: Path, forks: Forks
) -> None:
    writer = forks.start(WRITER.format(root=str(tmp_path), keep=1))
    try:
        deadline = time.monotonic() + 30
        while latest(tmp_path) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        steps = [load_checkpoint(tmp_path).step for _ in range(100)]
    finally:
        forks.kill(writer)
    assert steps == sorted(steps) and steps[-1] > steps[0]
