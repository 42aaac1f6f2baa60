"""Agents with sandboxes on one node of a cluster, and their engine on another."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ray")
pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("starlette", reason="engines are served with the extra agents")

import unirl
from tests.cluster.nodes import descendants
from tests.cluster.raylets import Raylets
from tests.tiny_calculator import PAID
from unirl.llm.agents.episode import Episode
from unirl.llm.models.tiny import make_tiny
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.store import open_store

pytestmark = pytest.mark.slow
CPUS = 4
SETTINGS: dict[str, Any] = {
    **PAID,
    "agent.tools": ("python",),
    "algorithm.entropy_coef": 0.05,
    "queue.batch_size": 16,
    "queue.timeout_seconds": 120.0,
    "agent.episode_seconds": 60.0,
    "runner.kind": "ray",
    "run.total_steps": 2560,
    "run.log_seconds": 0.0,
    "engine.kind": "openai",
    "engine.api_key_variable": "UNIRL_ENGINE_KEY",
    "engine.probe_versions": 5,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", width=64, layers=2))


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    os.environ["UNIRL_ENGINE_KEY"] = "a secret of the tests"  # nodes inherit it
    found = Raylets(cpus=CPUS)
    yield found
    found.close()
    del os.environ["UNIRL_ENGINE_KEY"]


@contextlib.contextmanager
def engine(raylets: Raylets, model: str) -> Iterator[dict[str, Any]]:
    """On a node that has room for nothing else then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.engine_node", model],
        env={**os.environ, "ENGINE_CLUSTER": raylets.address, "ENGINE_CPUS": str(CPUS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate("", timeout=60)


class Seen:
    """What runs on each node, looked at while a run lasts: processes, by number their output."""

    def __init__(self, raylets: Raylets) -> None:
        self.pids: dict[str, set[int]] = {node: set() for node in raylets.nodes}
        self.outputs: dict[str, set[str]] = {node: set() for node in raylets.nodes}
        self._raylets, self._ended = raylets, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Seen:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            for node, pids in self.pids.items():
                for pid in descendants(self._raylets.pid(node)):
                    pids.add(pid)
                    with contextlib.suppress(OSError):
                        self.outputs[node].add(os.readlink(f"/proc/{pid}/fd/1"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_agents_with_sandboxes_draw_from_an_engine_on_another_node(
    raylets: Raylets, model: str, tmp_path: Path, mode: str
) -> None:
    run_dir = tmp_path / "run"
    settings = {**SETTINGS, "mode": mode, "model.path": model, "ray.address": raylets.address}
    settings["queue.max_staleness"] = 2 if mode == "async" else 0
    with engine(raylets, model) as there, Seen(raylets) as seen:
        plan = unirl.make_plan("agent", **settings, **{"engine.url": there["url"]})
        result = unirl.run(plan, run_dir, console=False)
    assert result.reason == "total_steps"
    # The engine is on one node, the agents with their tools are on the other.
    (here,) = set(raylets.nodes) - {there["node"]}
    log = str((run_dir / "logs" / "actor-000.txt").resolve())
    assert there["pid"] in seen.pids[there["node"]] and there["pid"] not in seen.pids[here]
    assert log in seen.outputs[here] and log not in seen.outputs[there["node"]]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    rows = [row for row in rows if "agent/turns" in row]
    # What tools said was given to the model, and no episode failed for what the policy did not do.
    assert sum(row["agent/calls"] for row in rows) > 0
    assert all(row["agent/ending/infrastructure"] == row["agent/ending/crash"] == 0 for row in rows)
    assert all(row["faults/actor_restarts"] == 0 for row in rows if "faults/actor_restarts" in row)
    # Tokens are those that were drawn, under the version that they carry.
    if mode == "sync":
        key = "sampling/sampling_logp_difference/max"
        assert max(row[key] for row in rows) < 1e-3
    assert result.scalars["staleness/token_max"] <= settings["queue.max_staleness"]
    turns = [turn for episode in episodes(run_dir) for turn in episode.turns]
    assert any(message["role"] == "tool" for turn in turns for message in turn.messages)
    versions = [turn.completion.version for turn in turns]
    assert all(each == tuple(sorted(each)) for each in versions)
    drawn = {version for each in versions for version in each}
    num_updates = settings["run.total_steps"] // 128
    assert drawn <= set(range(num_updates + 1)) and len(drawn) > num_updates // 2


def episodes(run_dir: Path) -> list[Episode]:
    """Those that are kept whole."""
    store = open_store(StoreConfig(), run_dir, create=False)
    try:
        kept = [row for row in store.find(limit=10_000) if row["body_size"] is not None]
        return [store.get(int(row["id"])).episode for row in kept]
    finally:
        store.close()
