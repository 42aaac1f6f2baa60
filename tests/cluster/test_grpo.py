"""GRPO with engines on the nodes of a cluster: one of them is killed in the middle of its work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ray")
pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.cluster.test_ray import Raylets
from tests.system.grpo_faults import account
from tests.system.grpo_settings import SMALL
from unirl.llm.models.tiny import make_tiny

pytestmark = pytest.mark.slow
GROUP, BATCH = 8, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", width=64, layers=2))


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    found = Raylets()
    yield found
    found.close()


def test_a_killed_engines_groups_are_continued_by_the_other_node(
    raylets: Raylets, model: str, tmp_path: Path
) -> None:
    settings = {
        **SMALL, "model.path": model, "rollout.group_size": GROUP, "queue.batch_size": BATCH,
        "runner.kind": "ray", "ray.address": raylets.address, "num_engines": 2,
        "mode": "async", "queue.max_staleness": 3, "rollout.save_seconds": 0.02,
        "sampling.max_tokens": 64,
        "run.total_steps": 10**9, "run.max_seconds": 60.0,
    }  # fmt: skip
    run_dir, plan = tmp_path / "run", unirl.make_plan("grpo", **settings)
    ended = threading.Event()
    killer = threading.Thread(target=kill_engines, args=(run_dir, ended), daemon=True)
    killer.start()
    result = unirl.run(plan, run_dir, console=False)
    ended.set()
    killer.join()
    assert result.reason == "interrupted" and result.scalars["faults/actor_restarts"] >= 1
    assert result.scalars["staleness/token_max"] <= 3
    assert continued(run_dir)
    # Each prompt was learned once, waits, or was discarded with a reason.
    there, missing = account(run_dir)
    assert len(there) == len(set(there)), Counter(there).most_common(3)
    assert len(missing) == result.scalars.get("queue/discarded/stale", 0)
    mixed = [row for row in rows(run_dir / "samples" / "samples.jsonl") if row["versions"][1:]]
    assert all(row["versions"] == sorted(row["versions"]) for row in mixed)


def continued(run_dir: Path) -> list[str]:
    logs = [path.read_text() for path in (run_dir / "logs").glob("actor-*.txt")]
    return re.findall(r"prompt \d+ is continued with [1-9]\d* tokens", "".join(logs))


def kill_engines(run_dir: Path, ended: threading.Event) -> None:
    """One after the other, until one of them was in the middle of something."""
    metrics = run_dir / "metrics.jsonl"
    while not ended.wait(0.1):
        if metrics.exists() and metrics.read_text().count("\n") > 3 and not continued(run_dir):
            log = str((run_dir / "logs" / "actor-000.txt").resolve())
            for pid in [
                int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()
            ]:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/1") == log:
                        os.kill(pid, signal.SIGKILL)
            ended.wait(1.5)
        elif continued(run_dir) and not ended.wait(1.0):
            os.kill(os.getpid(), signal.SIGINT)  # ends it in good order
            return


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]
