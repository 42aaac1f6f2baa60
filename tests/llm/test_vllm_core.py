"""A start or an end of vLLM that takes too long leaves no process and delays no caller. In vLLM's
place is a package that only does what takes long: its processes and waits are real.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests import forked

_VLLM = """
import dataclasses
from typing import Any

@dataclasses.dataclass
class AsyncEngineArgs:
    model: str = ""
    dtype: str = ""
    max_num_seqs: int = 0
    enforce_eager: bool = True
    seed: int = 0
    logprobs_mode: str = ""
    disable_log_stats: bool = True
    use_tqdm_on_load: bool = False
    trust_remote_code: bool = False
    worker_extension_cls: str = ""
    weight_transfer_config: Any = None
    enable_chunked_prefill: bool = True
    kv_cache_memory_bytes: int = 0
    skip_tokenizer_init: bool = False

    def create_engine_config(self):
        return self
"""
_PLATFORMS = """
class current_platform:
    is_cpu = staticmethod(lambda: True)
"""
_ENGINE = """
import os, pathlib, subprocess, time

marks = pathlib.Path(os.environ["MARKS"])

class AsyncLLM:
    output_handler = None
    errored = False

    def __init__(self):
        # A core with a worker below it.
        script = "sleep 300 & echo $! > $MARKS/worker; wait"
        self.core = subprocess.Popen(["sh", "-c", script], stderr=subprocess.DEVNULL)
        (marks / "core").write_text(str(self.core.pid))
        while not (marks / "worker").exists() or not (marks / "worker").read_text().strip():
            time.sleep(0.01)

    @classmethod
    def from_vllm_config(cls, config, **settings):
        made = cls()
        (marks / "born").touch()
        time.sleep(float(os.environ["BUILD_SECONDS"]))
        return made

    def shutdown(self, timeout=None):
        (marks / "shutdown").touch()
        time.sleep(float(os.environ["SHUTDOWN_SECONDS"]))

    async def get_supported_tasks(self):
        return []

    async def collective_rpc(self, method, args=()):
        return [{"dtype": "float32", "pid": 0, "device": "cpu"}]
"""
_HEAD = """
import asyncio, os, pathlib, subprocess, sys, time
from unirl.llm.engines.vllm import core as vllm_core
from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.models.model import ModelConfig
from unirl.llm.weights.process import is_running, start_time

marks = pathlib.Path(os.environ["MARKS"])
vllm_core.GRACE_SECONDS = 0.5
config = EngineConfig(kind="vllm", timeout_seconds=1.0)

def running():
    found = [marks / "core", marks / "worker"]
    pids = [int(one.read_text()) for one in found if one.exists() and one.read_text().strip()]
    assert len(pids) == 2, pids
    return [pid for pid in pids if is_running(pid, start_time(pid))]

def until(wanted):
    end = time.monotonic() + 20
    while not wanted():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)

def new_core():
    return vllm_core.VllmCore(config, ModelConfig(path=str(marks)), lambda: False)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package named vllm, and a folder for what it does; in it, a model by its looks."""
    for name, text in (
        ("vllm/__init__.py", _VLLM),
        ("vllm/platforms.py", _PLATFORMS),
        ("vllm/v1/__init__.py", ""),
        ("vllm/v1/engine/__init__.py", ""),
        ("vllm/v1/engine/async_llm.py", _ENGINE),
        ("marks/config.json", "{}"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run_script(folder: Path, script: str) -> None:
    sys.path.insert(0, str(folder))
    exec(_HEAD + script, {"__name__": "__main__"})


def run(folder: Path, script: str, *, build: float, shutdown: float = 0.0) -> float:
    """The script's process must end well; the seconds from its mark "begin" to its end."""
    environment = {
        "MARKS": str(folder / "marks"),
        "BUILD_SECONDS": str(build),
        "SHUTDOWN_SECONDS": str(shutdown),
    }
    output = folder / "output.txt"
    process = forked.start(run_script, folder, script, environ=environment, output=output)
    process.join(100)
    process.kill()
    assert process.exitcode == 0, output.read_text()
    return time.time() - (folder / "marks" / "begin").stat().st_mtime


_TOO_SLOW = """
async def main():
    try:
        await new_core().start()
    except EngineFailed as error:
        assert "does not start" in str(error), error
    else:
        raise AssertionError("it started")
    assert not running()

(marks / "begin").touch()
asyncio.run(main())
"""


def test_a_start_that_times_out_leaves_no_process_and_is_not_waited_for(folder: Path) -> None:
    assert run(folder, _TOO_SLOW, build=40.0) < 20
    assert not (folder / "marks" / "shutdown").exists()


_LATE = """
async def main():
    try:
        await new_core().start()
    except EngineFailed:
        assert not (marks / "shutdown").exists()
        await asyncio.to_thread(until, (marks / "shutdown").exists)

(marks / "begin").touch()
asyncio.run(main())
"""


def test_a_start_that_succeeds_too_late_is_shut_down(folder: Path) -> None:
    run(folder, _LATE, build=2.5)


_CANCELLED = """
async def main():
    start = asyncio.create_task(new_core().start())
    await asyncio.to_thread(until, (marks / "born").exists)
    assert running()
    bystander = subprocess.Popen(["sleep", "300"])
    start.cancel()
    await asyncio.wait({start})
    assert start.cancelled()
    assert not running()
    assert bystander.poll() is None, "a process of somebody else was killed"
    bystander.kill()
    bystander.wait()

config = EngineConfig(kind="vllm", timeout_seconds=100.0)
(marks / "begin").touch()
asyncio.run(main())
"""


def test_a_start_that_is_cancelled_ends_its_own_processes_alone(folder: Path) -> None:
    assert run(folder, _CANCELLED, build=40.0) < 20


_IMPATIENT = """
async def main():
    core = new_core()
    await core.start()
    scratch = core.scratch.path()
    assert running()
    try:
        await asyncio.wait_for(core.close(), 0.5)
    except TimeoutError:
        pass
    else:
        raise AssertionError("vLLM's end was waited for, although it takes longer")
    assert not running()
    assert not scratch.exists()

(marks / "begin").touch()
asyncio.run(main())
"""


def test_a_caller_that_loses_patience_with_the_end_still_leaves_no_process(folder: Path) -> None:
    assert run(folder, _IMPATIENT, build=0.0, shutdown=60.0) < 20


_HANGING = """
async def main():
    from unirl.runners.async_actors import _END_SECONDS

    core = new_core()
    await core.start()
    await asyncio.wait_for(core.close(), _END_SECONDS)
    assert not running()

(marks / "begin").touch()
asyncio.run(main())
"""


def test_an_end_that_hangs_fits_into_what_a_runner_allows(folder: Path) -> None:
    assert run(folder, _HANGING, build=0.0, shutdown=60.0) < 20
