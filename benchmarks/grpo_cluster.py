"""GRPO on a cluster of three nodes: two engines, a node for each, and a learner of two ranks that
hold a shard each. Trained in every mode that fits; in the last an engine is killed on the way.

    python benchmarks/grpo_cluster.py --write

The nodes are raylets of this machine: it shows that the parts work together, not what it gains.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import measure

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import unirl
from unirl.llm.models.tiny import make_tiny

TARGET = 0.9
SETTINGS: dict[str, Any] = {
    "task.name": "reverse", "task.options": {"digits": "1"}, "task.max_prompt": 16,
    "sampling.max_tokens": 4, "algorithm.entropy_coef": 0.01, "learner.optimizer.lr": 2e-3,
    "rollout.group_size": 8, "queue.batch_size": 16, "run.total_steps": 60_000,
    "run.target_return": TARGET, "run.target_window": 512, "run.log_seconds": 0.5,
    "runner.kind": "ray", "runner.learner_threads": 1, "num_engines": 2, "learner.ranks": 2,
    "model.shard": True, "rollout.save_seconds": 0.05,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one-step-off": {},
    "async": {"queue.max_staleness": 2},
}


def start_cluster() -> Any:
    """The head, where the learner is and no engine finds a place, and two nodes more."""
    from ray.cluster_utils import Cluster

    from unirl.runners.cluster.ray import HEALTH

    small = {"object_store_memory": 80 * 2**20}
    head = {**small, "num_cpus": 0, "include_dashboard": False, "_system_config": dict(HEALTH)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, **small)
    return cluster


def train(mode: str, model: str, address: str, run_dir: Path, kills: bool) -> list[object]:
    """A row of the table."""
    settings = {**SETTINGS, **MODES[mode], "mode": mode, "model.path": model}
    plan = unirl.make_plan("grpo", **settings, **{"ray.address": address})
    if kills:
        threading.Thread(target=kill_engine, args=(run_dir,), daemon=True).start()
    started = time.monotonic()
    result = unirl.run(plan, run_dir, console=False)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    reward = max(row.get("charts/episodic_return", 0.0) for row in rows)
    restarts = int(result.scalars.get("faults/actor_restarts", 0))
    oldest = int(max(row.get("staleness/token_max", 0) for row in rows))
    seconds = f"{time.monotonic() - started:.0f}"
    steps = f"{result.num_steps:,}"
    return [mode, f"{reward:.2f}", steps, seconds, oldest, restarts, result.reason]


def kill_engine(run_dir: Path) -> None:
    """One of them, when the run is on its way."""
    rows = run_dir / "metrics.jsonl"
    while not rows.exists() or rows.read_text().count("\n") < 6:
        time.sleep(0.1)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                log = os.readlink(entry / "fd" / "1")
            except OSError:
                continue
            if log == str((run_dir / "logs" / "actor-000.txt").resolve()):
                os.kill(int(entry.name), signal.SIGKILL)
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--write", action="store_true", help="write RESULTS.md")
    options = parser.parse_args()
    cluster = start_cluster()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = str(make_tiny(Path(folder) / "tiny", width=64, layers=2))
            rows = []
            for mode in options.modes:
                kills = mode == "async"
                rows.append(train(mode, model, cluster.address, Path(folder) / mode, kills))
                print(*rows[-1], flush=True)
    finally:
        cluster.shutdown()
    columns = ("mode", "reward", "completions", "seconds", "oldest token", "engines lost", "ended")
    print(measure.table(columns, rows))
    if options.write:
        measure.write_rows("grpo-cluster", columns, rows)


if __name__ == "__main__":
    main()
