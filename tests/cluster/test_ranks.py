"""Ranks of a learner on the nodes of a cluster: placed, replaced, and given what they need."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unirl
from tests.cluster.nodes import descendants
from tests.cluster.raylets import DEADLINE_SECONDS, Raylets, kill
from tests.cluster.test_same_samples import plan_of
from unirl.errors import UniRLError
from unirl.run_events import NAME as EVENTS

RESTARTED = ("restarted", "rank 1")


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    found = Raylets(cpus=3)
    yield found
    found.close()


def ranks_below(pid: int) -> list[int]:
    return [
        each
        for each in descendants(pid)
        if b"RankActor" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


def node_of_rank(raylets: Raylets) -> str:
    return next((node for node in raylets.nodes if ranks_below(raylets.pid(node))), "")


class Watching(threading.Thread):
    """Brings faults about while a run trains, a few updates after each other; then ends it."""

    def __init__(self, run_dir: Path, *faults: Callable[[], None]) -> None:
        super().__init__()
        self._run_dir, self._faults, self.failed = run_dir, faults, ""

    def run(self) -> None:
        for number in range(len(self._faults) + 1):
            if not self._trains(number):
                self.failed = f"nothing was learned after {number} faults"
                break
            if number < len(self._faults):
                self._faults[number]()
        os.kill(os.getpid(), signal.SIGINT)

    def _trains(self, num_faults: int) -> bool:
        """Whether the rank was replaced so often, and three rows came since, in time."""
        deadline, have = time.monotonic() + DEADLINE_SECONDS, None
        while time.monotonic() < deadline:
            time.sleep(0.05)
            rows = self._run_dir / "metrics.jsonl"
            number = rows.read_text().count("\n") if rows.exists() else 0
            if have is None:
                if rows.exists() and events(self._run_dir).count(RESTARTED) == num_faults:
                    have = number
            elif number >= have + 3:
                return True
        return False


def settings(raylets: Raylets, **others: Any) -> dict[str, Any]:
    return {
        "ray.address": raylets.address, "ray.rank_cpus": 1.0, "learner.ranks": 2,
        "queue.timeout_seconds": 20.0, "run.log_seconds": 0.0, "run.total_steps": 10**9,
        "run.max_run_restarts": 0, **others,
    }  # fmt: skip


def events(run_dir: Path) -> list[tuple[str, str]]:
    found = [json.loads(line) for line in (run_dir / EVENTS).open()]
    return [(each["event"], each.get("member", "")) for each in found]


def test_a_rank_of_another_node_is_replaced_wherever_there_is_room(
    raylets: Raylets, tmp_path: Path
) -> None:
    run_dir, nodes = tmp_path / "run", []

    def kill_rank() -> None:
        nodes.append(node_of_rank(raylets))
        for pid in ranks_below(raylets.pid(nodes[-1])):
            kill(pid, signal.SIGKILL)

    def kill_node() -> None:
        nodes.append(node_of_rank(raylets))
        raylets.kill(nodes[-1])

    watching = Watching(run_dir, kill_rank, kill_node)
    watching.start()
    plan = plan_of("impala", **settings(raylets))
    result = unirl.run(plan, run_dir, console=False)
    watching.join()
    assert watching.failed == "" and all(nodes)
    assert result.reason == "interrupted"
    assert result.scalars["faults/rank_restarts"] == 2
    assert result.scalars["staleness/max"] <= plan.learner.queue.max_staleness
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()]
    assert steps == sorted(steps)
    found = events(run_dir)
    assert found.count(RESTARTED) == 2 and found.count(("started", "run")) == 1
    wait_until_nothing_is_left(raylets)

    # The other rank is sent the checkpoint: its node need not see the run's folder.
    steps_wanted = result.num_steps + 2000
    again = plan_of("impala", **settings(raylets, **{"run.total_steps": steps_wanted}))
    resumed = unirl.run(again, run_dir, resume=run_dir, console=False)
    assert resumed.reason == "total_steps" and resumed.num_steps >= steps_wanted
    wait_until_nothing_is_left(raylets)


def wait_until_nothing_is_left(raylets: Raylets) -> None:
    deadline = time.monotonic() + 5.0
    while node_of_rank(raylets):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_language_model_is_divided_among_ranks_of_several_nodes(
    raylets: Raylets, tmp_path: Path
) -> None:
    given = {
        "task.name": "reverse", "task.options": {"digits": "1"}, "task.max_prompt": 16,
        "sampling.max_tokens": 4, "algorithm.entropy_coef": 0.01, "learner.optimizer.lr": 2e-3,
        "rollout.group_size": 8, "queue.batch_size": 16, "model.path": "tiny", "model.shard": True,
        "runner.kind": "ray", "num_engines": 2,
    }  # fmt: skip
    more = {"run.total_steps": 60_000, "run.target_return": 0.9, "run.target_window": 512}
    plan = unirl.make_plan("grpo", **settings(raylets, **given, **more))
    result = unirl.run(plan, tmp_path / "run", console=False)
    assert result.reason == "target_return"
    again = settings(raylets, **given, **{"run.total_steps": result.num_steps + 256})
    resumed = unirl.run(
        unirl.make_plan("grpo", **again), tmp_path / "run", resume=tmp_path / "run", console=False
    )
    assert resumed.reason == "total_steps" and resumed.scalars["reward"] > 0.8
    wait_until_nothing_is_left(raylets)


def test_ranks_that_no_node_has_room_for_are_refused(raylets: Raylets, tmp_path: Path) -> None:
    given = settings(raylets, **{"ray.rank_cpus": 64.0, "ray.wait_seconds": 1.0})
    with pytest.raises(UniRLError, match=r"1 ranks .* find no place.*64 CPUs") as error:
        unirl.run(plan_of("impala", **given), tmp_path / "run", console=False)
    assert "has" in error.value.parts[1] and len(error.value.parts) == 3
