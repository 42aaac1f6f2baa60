"""The driver or the head of a cluster ends: nothing is left on any node, and nothing is lost that a
checkpoint could hold. Heads are started as people start them, by `ray start`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import command_of, descendants, lives
from unirl.run_events import read_events
from unirl.storage.checkpoint import load_checkpoint

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "RAY_gcs_rpc_server_connect_timeout_s": "1",  # at the end, for a head that is gone
}


class Heads:
    """A head on one port, and a node; both may be started again."""

    def __init__(self, folder: Path, dashboard: int = 0) -> None:
        self.port, self.dashboard = free_port(), dashboard
        self.address = f"127.0.0.1:{self.port}"
        self._folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, cpus: int = 1) -> None:
        """Two nodes; with more CPUs one."""
        from unirl.runners.cluster.ray import HEALTH

        small = ["--num-cpus", str(cpus), "--object-store-memory", str(80 * 2**20)]
        head = ["--head", "--port", str(self.port), "--include-dashboard", "false"]
        if self.dashboard:
            head[-1:] = ["true", "--dashboard-port", str(self.dashboard)]
        self._ray([*head, *small, "--system-config", json.dumps(HEALTH)])
        wait(lambda: answers(self.dashboard or self.port), 30.0)
        if cpus == 1:
            self._ray(["--address", self.address, *small])
            wait(lambda: len(self.pids("raylet/raylet ")) == 2, 30.0)

    def _ray(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        ip = ["--node-ip-address", "127.0.0.1"]
        with (self._folder / f"ray-{len(self.running)}.txt").open("w") as log:
            self.running.append(
                subprocess.Popen(
                    [*command, *ip, *flags], stdout=log, stderr=log, start_new_session=True
                )
            )

    def processes(self) -> list[int]:
        return [pid for one in self.running for pid in descendants(one.pid)]

    def pids(self, name: str) -> list[int]:
        return [pid for pid in self.processes() if name in command_of(pid)]

    def close(self) -> None:
        everyone = self.processes()
        for pid in [*everyone, *(one.pid for one in self.running)]:
            signal_to(pid, signal.SIGKILL)
        for one in self.running:
            one.wait(10.0)
        self.running.clear()


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heads]:
    found = Heads(tmp_path_factory.mktemp("heads"))
    found.start()
    yield found
    found.close()


class Driver:
    """`unirl train`, as a process."""

    def __init__(self, heads: Heads, folder: Path, *flags: str) -> None:
        plan = "--env.id CartPole-v1 --actor.num-actors 2 --actor.num-envs 8 --queue.batch-size 2"
        run = f"--name run --runs-dir {folder} --run.total-steps 1000000000 --no-console"
        where = f"--runner.kind ray --ray.address {heads.address} --ray.silent-seconds 1.5"
        command = [sys.executable, "-m", "unirl", "train", "impala", *f"{plan} {run}".split()]
        self.run_dir, self.output = folder / "run", (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [*command, *where.split(), *flags],
            cwd=folder, env=ENVIRON, stdout=self.output, stderr=self.output,
        )  # fmt: skip

    def wait_for_rows(self, number: int = 1) -> None:
        self.wait(lambda: self.num_rows >= number)

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        wait(lambda: self.process.poll() is not None or condition(), seconds)
        assert self.process.poll() is None, self.said

    @property
    def num_rows(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    @property
    def log(self) -> str:
        return (self.run_dir / "log.txt").read_text()

    def events(self) -> list[tuple[str, str]]:
        return [(row["event"], row.get("member", "")) for row in read_events(self.run_dir)]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def test_nothing_is_left_on_any_node_of_a_driver_that_is_killed(
    heads: Heads, tmp_path: Path
) -> None:
    memory = {*os.listdir("/dev/shm")}
    before = {*heads.processes()}
    driver = Driver(heads, tmp_path)
    try:
        driver.wait_for_rows()
        new: set[int] = set()

        def members() -> list[int]:
            new.update({*heads.processes()} - before)
            return [pid for pid in new if name_of(pid).startswith("actor ")]

        driver.wait(lambda: len(members()) == 2)
        named = [pid for pid in new if "AgentActor" in command_of(pid)]
        forks = {child for pid in named for child in descendants(pid)}
        agents = [pid for pid in named if pid not in forks]
        assert len(agents) == 2, [command_of(pid) for pid in new]
        ours = {pid for agent in agents for pid in [agent, *descendants(agent)]}
        ours |= {*descendants(driver.process.pid)}
    finally:
        driver.end()
    killed = time.monotonic()
    while left := [pid for pid in ours if lives(pid)]:
        assert time.monotonic() - killed < 5.0, [command_of(pid) or name_of(pid) for pid in left]
        time.sleep(0.05)
    assert {*os.listdir("/dev/shm")} <= memory


def test_a_head_that_hangs_holds_up_nobody_for_a_while_and_is_lost_then(
    heads: Heads, tmp_path: Path
) -> None:
    driver = Driver(heads, tmp_path, "--ray.wait-seconds", "15")
    (gcs,) = heads.pids("gcs_server")
    try:
        driver.wait_for_rows()
        os.kill(gcs, signal.SIGSTOP)
        driver.wait(lambda: "accepts connections and answers nothing" in driver.log)
        rows = driver.num_rows
        driver.wait_for_rows(rows + 1)
        saved = driver.run_dir / "checkpoints" / "latest" / "state.json"
        driver.wait(saved.exists)
        os.kill(gcs, signal.SIGCONT)
        driver.wait(lambda: ("resumed", "run") in driver.events())
        rows = driver.num_rows
        driver.wait_for_rows(rows + 1)
    finally:
        os.kill(gcs, signal.SIGCONT)
        driver.end()


def test_a_run_survives_its_head_and_sigterm_writes_a_checkpoint(
    heads: Heads, tmp_path: Path
) -> None:
    """Last: the cluster is another one afterwards."""
    driver = Driver(heads, tmp_path)
    try:
        driver.wait_for_rows()
        (gcs,) = heads.pids("gcs_server")
        os.kill(gcs, signal.SIGKILL)
        driver.wait(lambda: ("restarted", "run") in driver.events())
        assert (driver.run_dir / "checkpoints" / "latest" / "state.json").exists()
        heads.close()
        heads.start(cpus=2)
        driver.wait(lambda: ("resumed", "run") in driver.events())
        rows = driver.num_rows
        driver.wait_for_rows(rows + 1)
        driver.process.terminate()  # what `ray job stop` does first
        asked = time.monotonic()
        assert driver.process.wait(30.0) == 0, driver.said
        assert time.monotonic() - asked < 10.0
    finally:
        driver.end()
    kinds = [kind for kind, member in driver.events() if member == "run"]
    assert kinds == ["started", "restarted", "resumed", "ended"]
    require_saved(driver.run_dir)


@pytest.mark.skipif(find_spec("aiohttp_cors") is None, reason="needs ray[default]")
def test_ray_job_stop_writes_a_checkpoint(tmp_path: Path) -> None:
    heads = Heads(tmp_path, dashboard=free_port())
    job = [sys.executable, "-m", "ray.scripts.scripts", "job"]
    flags = f"--env.id CartPole-v1 --name run --runs-dir {tmp_path} --run.total-steps 1000000000"
    flags += " --actor.num-envs 8 --runner.kind ray --ray.address auto --no-console"
    train = [sys.executable, "-m", "unirl", "train", "impala", *flags.split()]
    where = ["--address", f"http://127.0.0.1:{heads.dashboard}"]

    def call(*words: str) -> None:
        command, said = [*job, words[0], *where, *words[1:]], "No available agent"
        while "No available agent" in said:  # of Ray: it is still being started
            ended = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=60)
            said = ended.stdout + ended.stderr
        assert ended.returncode == 0, said

    try:
        heads.start(cpus=2)
        call("submit", "--no-wait", "--submission-id", "one", "--", *train)
        rows = tmp_path / "run" / "metrics.jsonl"
        wait(lambda: rows.exists() and rows.read_text(), 60.0)
        call("stop", "one")
    finally:
        heads.close()
    assert read_events(tmp_path / "run")[-1]["event"] == "ended"
    require_saved(tmp_path / "run")


def require_saved(run_dir: Path) -> None:
    """The newest checkpoint has all that was learned."""
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert load_checkpoint(run_dir).state["num_steps"] >= last["step"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def wait(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def signal_to(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
