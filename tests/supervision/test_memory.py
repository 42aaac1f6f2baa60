"""Memory that does not suffice is named, with how much is needed and how much there is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unirl.core.queue import QueueConfig
from unirl.core.sample import Field, SampleSpec
from unirl.errors import UniRLError
from unirl.host import available_memory, total_memory
from unirl.transports.local import LocalTransport
from unirl.transports.shared import SharedTransport

TRAIN = """
import sys, unirl
if __name__ == "__main__":
    open(sys.argv[1] + "/cgroup.procs", "w").write("0")
    plan = unirl.make_plan("impala", **{
        "env.id": "test/Greedy-v0", "env.import_module": "greedy_envs_for_test",
        "runner.kind": "processes", "policy.hidden": (8,), "actor.num_envs": 2,
    })
    try:
        unirl.run(plan, sys.argv[2], console=False)
    except unirl.UniRLError as error:
        print(*error.parts, sep="\\n")
"""
ENV = """
import gymnasium, numpy
from tests.toy_envs import Fault

class Greedy(Fault):
    def reset(self, **settings):
        self.kept = [numpy.ones(2**24) for _ in range(40)]
        return super().reset(**settings)

gymnasium.register("test/Greedy-v0", Greedy)
"""


@pytest.mark.parametrize("transport", [LocalTransport(), SharedTransport()])
def test_slots_that_memory_cannot_hold_are_refused(
    transport: LocalTransport | SharedTransport,
) -> None:
    spec = SampleSpec({"obs": Field((2**30,), torch.float32, batch_axis=0)})  # 4 GiB
    started = time.monotonic()
    with pytest.raises(UniRLError, match=r"slots need 640\.0 GiB of memory") as error:
        transport.queue(spec, QueueConfig(batch_size=80, max_staleness=1))
    assert time.monotonic() - started < 30.0
    assert len(error.value.parts) == 3
    assert "GiB left" in error.value.rule


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_more_is_available_than_there_is() -> None:
    available, total = available_memory(), total_memory()
    assert 0 < available[0] <= total[0]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """One whose processes may use 1 GiB, in version 1 or 2."""
    top = Path("/sys/fs/cgroup")
    version_1 = (top / "memory").is_dir()
    folder = (top / "memory" if version_1 else top) / f"unirl-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if version_1 else "memory.max")
        limit.write_text(str(2**30))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folder
    deadline = time.monotonic() + 10.0
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.rmdir()


@pytest.mark.slow
def test_a_run_that_memory_does_not_suffice_for_ends_and_says_so(
    cgroup: Path, tmp_path: Path
) -> None:
    (tmp_path / "greedy_envs_for_test.py").write_text(ENV)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script), str(cgroup), str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert "the kernel killed it because memory ran out" in lines[0]
    assert "has 1,024 MiB" in lines[0]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("memory ran out") == 1, "it was started again in vain"
