"""Runner `ray` on real raylets: two nodes on this machine, one cluster for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks import Recorder
from tests.cluster.nodes import Each, check_books, make_plan
from unirl.core.pool import Resources
from unirl.errors import UniRLError
from unirl.runners.loop import TrainLoop
from unirl.runners.make import make_runner

ray = pytest.importorskip("ray", reason="needs the extra ray")


class Raylets:
    """The head, and one node more: each raylet starts several processes, and takes seconds."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        from unirl.runners.cluster.ray import HEALTH

        small = {"object_store_memory": 80 * 2**20}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                **small, "num_cpus": 2, "include_dashboard": False, "_system_config": dict(HEALTH)
            },
        )  # fmt: skip
        self.node = self.cluster.add_node(num_cpus=2, **small)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def close(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    found = Raylets()
    yield found
    found.close()


def agents(runner: Any) -> list[int]:
    return [share.handle.pid for share in runner.processes._shares if share.handle]


@pytest.mark.serial
@pytest.mark.parametrize(
    ("fault", "seconds"),
    [("member", 2.0), pytest.param("agent", 5.0, marks=pytest.mark.slow)],
)
def test_members_are_spread_over_the_nodes_and_survive_kills(
    raylets: Raylets, fault: str, seconds: float
) -> None:
    plan = make_plan(members=4, batch_size=2, max_staleness=3, window=None, address=raylets.address)
    runner: Any = make_runner(plan)
    known: set[int] = set()
    times: list[float] = []

    def act(loop: TrainLoop) -> None:
        seeds = set(loop.learner.seeds)
        pids = runner.actor_pids() if fault == "member" else agents(runner)
        if not times and len(seeds) == 4 and pids and loop.learner.version >= 30:
            assert len({share.node for share in runner.processes._shares}) == 2
            known.update(seeds)
            times.append(time.monotonic())
            os.kill(pids[0], signal.SIGKILL)
        elif len(times) == 1 and seeds - known:
            times.append(time.monotonic())
        elif len(times) == 2 and runner.num_restarts:  # members' restarts come with signs of life
            loop.stop("enough")

    runner.run([Each(act)])
    check_books(runner.loop)
    assert times[1] - times[0] < seconds
    assert runner.num_restarts == 1


def test_what_no_node_has_is_an_error_within_a_deadline(raylets: Raylets) -> None:
    plan = make_plan(members=2, address=raylets.address, wait_seconds=1.0)
    plan = plan.with_pool(resources=Resources(cpus=1.0, gpus=1.0))
    started = time.monotonic()
    runner = make_runner(plan)
    with pytest.raises(UniRLError, match=r"asks for 1 CPUs, 1 GPUs.* has 2 CPUs"):
        runner.run([])
    assert time.monotonic() - started < 15.0


def test_no_such_address_is_an_error_in_three_parts() -> None:
    with pytest.raises(UniRLError, match="no Ray cluster answers") as error:
        make_runner(make_plan(address="127.0.0.1:1", wait_seconds=2.0))
    assert len(error.value.parts) == 3


@pytest.mark.slow
def test_a_wrong_token_is_an_error_in_three_parts(raylets: Raylets, tmp_path: Path) -> None:
    flags = "--env.id CartPole-v1 --runner.kind ray --no-console --ray.address"
    command = [sys.executable, "-m", "unirl", "train", "impala", *flags.split(), raylets.address]
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "RAY_AUTH_TOKEN": "0f" * 32, "PYTHONPATH": path}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2, said
    assert "Traceback" not in said and "token" in said and raylets.address in said


@pytest.mark.slow
def test_cartpole_trains_on_two_nodes_and_its_run_is_resumed(
    raylets: Raylets, tmp_path: Path
) -> None:
    import unirl

    settings = {
        "env.id": "CartPole-v1", "runner.kind": "ray", "ray.address": raylets.address,
        "actor.num_actors": 2, "actor.num_envs": 16, "queue.batch_size": 2, "run.seed": 3,
        "run.total_steps": 20_000, "policy.module": "tests.networks:Whole",
    }  # fmt: skip
    plan, recorder = unirl.make_plan("impala", **settings), Recorder()
    first = unirl.run(plan, tmp_path / "run", console=False, callbacks=[recorder])
    assert first.reason == "total_steps" and first.scalars["perf/sps"] > 0
    versions = [version for _, version, _, _ in recorder.calls]
    assert versions == [*range(1, first.version + 1), first.version]
    settings["run.total_steps"] = 40_000
    plan = unirl.make_plan("impala", **settings)
    second = unirl.run(plan, tmp_path / "run", resume=tmp_path / "run", console=False)
    assert second.num_steps >= 40_000 and second.version > first.version


@pytest.mark.slow
@pytest.mark.serial
def test_a_raylet_that_is_killed_is_replaced_by_the_other_node(raylets: Raylets) -> None:
    """Last: the node does not come back."""
    plan = make_plan(members=2, batch_size=1, max_staleness=3, window=None, address=raylets.address)
    runner = make_runner(plan)
    killed: list[float] = []
    known: set[int] = set()

    def act(loop: TrainLoop) -> None:
        seeds = set(loop.learner.seeds)
        if not killed and len(seeds) == 2 and loop.learner.version > 40:
            known.update(seeds)
            raylet = raylets.node.all_processes["raylet"][0].process
            killed.append(time.monotonic())
            os.kill(raylet.pid, signal.SIGKILL)
        elif killed and seeds - known:
            killed.append(time.monotonic())
            loop.stop("enough")
        elif killed and time.monotonic() - killed[0] > 40:
            loop.stop("too late")

    runner.run([Each(act)])
    check_books(runner.loop)
    assert killed[-1] - killed[0] < 15.0
