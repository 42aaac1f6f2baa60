"""What users get wrong with clusters, on real ones: three parts, in time, and nothing is started.

The head has no CPUs; each test asks for a node that is unlike the others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import make_plan
from unirl import cli
from unirl.core.pool import Resources
from unirl.errors import UniRLError
from unirl.runners.make import make_runner

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow
SMALL = {"object_store_memory": 80 * 2**20}
ENV = """
import gymnasium, my_numbers, numpy
print("imported from", __file__, flush=True)
class Away(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (my_numbers.SIZE,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.1), False, {}
gymnasium.register("my/Away-v0", Away)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, "include_dashboard": False}
    )
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, which is on the learner's machine alone."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_away.py").write_text(ENV)
    (folder / "my_numbers.py").write_text("SIZE = 3\n")
    return folder


@pytest.fixture(scope="module")
def away(cluster: Any, own_folder: Path) -> Iterator[None]:
    """A node with mounts of its own: it has little shared memory, and lacks the user's folder."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounts of its own are not permitted here")
    mounts = "mount -t tmpfs -o size=24m none /dev/shm && mount -t tmpfs none {}".format
    start = (
        f"{mounts(own_folder)} && exec {sys.executable} -m ray.scripts.scripts start --block "
        f"--address {cluster.address} --num-cpus 2 --num-gpus 2 --labels kind=away "
        f"--object-store-memory {80 * 2**20}"
    )
    log = (own_folder.parent / "away.txt").open("w+")
    process = subprocess.Popen(
        ["unshare", "-m", "bash", "-c", start], stdout=log, stderr=log, start_new_session=True
    )
    cluster.connect()
    deadline = time.monotonic() + 40.0
    while ray.cluster_resources().get("CPU", 0.0) < 2.0:
        log.seek(0)
        assert time.monotonic() < deadline and process.poll() is None, log.read()
        time.sleep(0.1)
    ray.shutdown()
    yield
    process.send_signal(signal.SIGTERM)
    process.wait(20.0)


def refused(plan: Any) -> UniRLError:
    started = time.monotonic()
    with pytest.raises(UniRLError) as error:
        make_runner(plan).run([])
    assert len(error.value.parts) == 3 and time.monotonic() - started < 20.0
    return error.value


def test_an_address_where_something_else_answers_is_refused_in_time() -> None:
    command = [sys.executable, "-m", "unirl", "train", "impala", "--env.id", "CartPole-v1"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        flags = ["--runner.kind", "ray", "--ray.address", address, "--name", "none"]
        # Ray's own default, 14 minutes, is what RayCluster bounds to 16 s.
        quick = dict.fromkeys(
            ["RAY_py_gcs_connect_timeout_s", "RAY_gcs_rpc_server_connect_timeout_s"], "1"
        )
        ended = subprocess.run(
            [*command, *flags],
            env={**os.environ, **quick},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert f"the Ray cluster at '{address}' could not be joined" in ended.stderr


def test_a_cluster_of_another_ray_is_refused(cluster: Any) -> None:
    from ray._private.utils import compute_version_info

    client = cluster.head_node.get_gcs_client()
    key, space = b"CLUSTER_METADATA", b"cluster"
    before = client.internal_kv_get(key, space)
    assert json.loads(before)["ray_version"] == compute_version_info()[0]
    client.internal_kv_put(key, before.replace(ray.__version__.encode(), b"2.9.1"), True, space)
    try:
        error = refused(make_plan(address=cluster.address))
    finally:
        client.internal_kv_put(key, before, True, space)
    assert "do not fit" in error.what and "2.9.1" in error.what


def test_a_node_with_another_torch_is_refused(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "torch-2.11.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.9+cpu\n"
    (tmp_path / "torch-2.11.9.dist-info" / "METADATA").write_text(metadata)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    node = cluster.add_node(
        **SMALL, num_cpus=0, labels={"kind": "other"}, env_vars={"PYTHONPATH": path}
    )
    try:
        plan = make_plan(members=1, address=cluster.address, wait_seconds=20.0)
        plan = plan.with_pool(resources=Resources(cpus=0.0, labels={"kind": "other"}))
        error = refused(plan)
    finally:
        cluster.remove_node(node)
    assert "has torch 2.11.9" in error.what and "has torch 2.1" in error.rule


def test_a_node_with_little_shared_memory_is_refused(cluster: Any, away: None) -> None:
    plan = make_plan(members=1, address=cluster.address, wait_seconds=20.0)
    error = refused(plan.with_pool(resources=Resources(cpus=1.0, gpus=2.0)))
    assert "too little shared memory" in error.what
    assert "24 MiB are free" in error.rule and "1,024 MiB are needed" in error.rule


def test_what_a_node_lacks_of_the_users_modules_is_sent(
    cluster: Any, away: None, own_folder: Path, tmp_path: Path
) -> None:
    flags = (
        f"--env.id my/Away-v0 --env.import-module my_away --runner.kind ray --ray.address "
        f"{cluster.address} --name sent --runs-dir {tmp_path} --run.total-steps 2000 "
        "--actor.num-actors 1 --actor.num-envs 4 --queue.batch-size 1 --no-console"
    )
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "unirl", "train", "impala", *flags.split()]
    ended = subprocess.run(
        command, cwd=own_folder, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = (tmp_path / "sent" / "logs" / "actor-000.txt").read_text()
    assert "imported from" in said and "unirl-parcel-" in said
    assert not list(Path("/tmp").glob("unirl-parcel-*/my_away.py"))


def test_the_doctor_compares_the_nodes_of_a_cluster(
    cluster: Any, away: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["doctor", "--json", "--ray.address", cluster.address])
    found = json.loads(capsys.readouterr().out)
    assert len(found["nodes"]) == 2 and all("facts" in node for node in found["nodes"]), found
    problems = [
        one["subject"] for node in found["nodes"] for one in node["findings"] if one["is_problem"]
    ]
    assert "/dev/shm" in problems and code == 1
    first, second = (node["node"] for node in found["nodes"])
    between = {one["subject"]: one["is_problem"] for one in found["differences"]}
    assert between["clocks"] is False
    ways = [(first, second), (second, first), (first, "this process"), (second, "this process")]
    assert {f"bandwidth, {a} to {b}" for a, b in ways} <= {*between}
