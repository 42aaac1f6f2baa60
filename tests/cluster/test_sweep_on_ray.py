"""`unirl sweep` on a cluster: a node is lost on the way, and Ctrl-C ends what trains on all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import descendants
from tests.cluster.raylets import DEADLINE_SECONDS, Raylets
from unirl import cli
from unirl.errors import UniRLError
from unirl.storage.run_lock import locked
from unirl.sweep.trial_actor import Probe

pytest.importorskip("ray", reason="needs the extra ray")
ROOT = Path(cli.__file__).resolve().parent.parent
FILE = """
recipe = "impala"
seeds = [1]
on = "ray"

[space]
learner.optimizer.lr = [1e-3, 3e-3]

[halving]
first_steps = 8_000
reduction = 2
asynchronous = true

[env]
id = "CartPole-v1"

[actor]
num_envs = 16
unroll_length = 16

[runner]
kind = "inline"

[run]
total_steps = 16_000
checkpoint_steps = 500
log_seconds = 0.1
"""


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    """Two nodes with room for one run each."""
    found = Raylets(cpus=1)
    yield found
    found.close()


class Sweeping:
    """A sweep as a process."""

    def __init__(self, folder: Path, raylets: Raylets, *flags: str) -> None:
        (folder / "lr.toml").write_text(FILE)
        self.folder, self.output = folder / "runs" / "lr", folder / "output.txt"
        words = ["sweep", "lr.toml", "--ray.address", raylets.address, *flags]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unirl", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
            )

    def trials(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.folder / "sweep.json").read_text())["trials"]
        return found

    def until(self, held: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not held():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def have_checkpoints(self) -> bool:
        return len([*self.folder.glob("trial-*/checkpoints/latest")]) == 2

    def said(self) -> str:
        return self.output.read_text()


def trains_below(pid: int) -> list[int]:
    """Processes of runs among all that a process started."""
    return [
        each
        for each in descendants(pid)
        if b"\0unirl\0" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


@pytest.mark.slow
def test_runs_of_a_lost_node_continue_and_after_ctrl_c_the_sweep_does(
    raylets: Raylets, tmp_path: Path
) -> None:
    first = Sweeping(tmp_path, raylets)
    first.until(first.have_checkpoints)
    lost = next(node for node in raylets.nodes if trains_below(raylets.pid(node)))
    raylets.kill(lost)
    first.until(lambda: any(run["lost"] for trial in first.trials() for run in trial["runs"]))
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(DEADLINE_SECONDS) == 0, first.said()
    assert "stopped: interrupted" in first.said()
    for folder in first.folder.glob("trial-*"):
        with locked(folder):  # nothing trains there
            pass
    assert not [*first.folder.glob(".seen-by-nodes-*")]

    again = Sweeping(tmp_path, raylets)  # one node is left
    assert again.process.wait(DEADLINE_SECONDS) == 0, again.said()
    trials = again.trials()
    assert sorted(trial["status"] for trial in trials) == ["finished", "stopped"]
    assert sum(run["lost"] for trial in trials for run in trial["runs"]) == 1
    for folder in again.folder.glob("trial-*"):
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
        assert steps == sorted(set(steps))
        assert "resume" in (folder / "command.txt").read_text(), "it began from nothing"


def test_a_sweep_that_asks_for_more_than_nodes_have_says_what_they_have(
    raylets: Raylets, tmp_path: Path
) -> None:
    sweep = Sweeping(tmp_path, raylets, "--resources.cpus", "64", "--ray.wait-seconds", "1")
    assert sweep.process.wait(DEADLINE_SECONDS) == 2
    assert "each asks for 64 CPUs" in sweep.said() and "has 1 CPUs" in sweep.said()


def test_a_node_without_the_folder_of_the_sweep_is_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match="does not see the folder of the sweep"):
        Probe(tmp_path / "not-shared").check("far", patience_seconds=0.0)
