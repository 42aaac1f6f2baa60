"""A learner of two ranks that the run starts by itself learns what one process learns, from one
queue, and replaces a rank that is lost.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from unirl.core.tree import flatten
from unirl.errors import RunLost, UniRLError
from unirl.run_events import read_events
from unirl.storage.checkpoint import load_checkpoint

UNROLLS: dict[str, Any] = {
    "env.id": "CartPole-v1", "actor.num_envs": 4, "actor.unroll_length": 8, "queue.batch_size": 4,
    "policy.hidden": (16,), "runner.kind": "inline", "run.total_steps": 300,
    "queue.timeout_seconds": 60.0, "runner.learner_threads": 1,
}  # fmt: skip


def learned(settings: dict[str, Any], recipe: str, run_dir: Path) -> dict[str, torch.Tensor]:
    result = unirl.run(unirl.make_plan(recipe, **settings), run_dir, console=False)
    assert result.version >= 2
    return flatten(load_checkpoint(run_dir).model)


def require_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5, msg=name)


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    alone = learned(UNROLLS, "impala", tmp_path / "alone")
    require_close(alone, learned({**UNROLLS, "learner.ranks": 2}, "impala", tmp_path / "two"))


@pytest.mark.slow
def test_a_sharded_language_model_learns_the_same_and_is_resumed_by_one_process(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers", reason="language models need the extra llm")
    from tests.system.grpo_settings import SMALL
    from unirl.llm.models.tiny import make_tiny

    model = make_tiny(tmp_path / "model", width=32, layers=1)
    settings = {
        **SMALL, "model.path": str(model), "rollout.group_size": 4, "queue.batch_size": 4,
        "run.total_steps": 48, "rollout.zero_variance": "train", "learner.optimizer.epsilon": 1e-3,
    }  # fmt: skip
    alone = learned(settings, "grpo", tmp_path / "alone")
    ranks = {**settings, "learner.ranks": 2, "model.shard": True}
    require_close(alone, learned(ranks, "grpo", tmp_path / "two"))
    together = unirl.make_plan("grpo", **{**ranks, "run.total_steps": 56})
    unirl.run(together, tmp_path / "two", resume=tmp_path / "two", console=False)
    more = {**settings, "run.total_steps": 64}
    plan = unirl.make_plan("grpo", **more)
    result = unirl.run(plan, tmp_path / "two", resume=tmp_path / "two", console=False)
    assert result.num_steps == 64


@pytest.mark.slow
def test_ranks_share_the_batches_of_engines_that_run_ahead(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="language models need the extra llm")
    from tests.system.grpo_settings import SMALL

    settings = {
        **SMALL, "model.path": "tiny", "rollout.group_size": 4, "queue.batch_size": 4,
        "run.total_steps": 96, "mode": "async", "queue.max_staleness": 2, "num_engines": 2,
        "learner.ranks": 2, "model.shard": True,
    }  # fmt: skip
    result = unirl.run(unirl.make_plan("grpo", **settings), tmp_path / "run", console=False)
    assert (result.version, result.num_steps) == (6, 96)
    assert result.scalars["staleness/token_max"] <= 2
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed_is_replaced_while_actors_keep_what_they_have(
    tmp_path: Path,
) -> None:
    settings = {
        **UNROLLS, "runner.kind": "processes", "learner.ranks": 2, "run.log_seconds": 0.0,
        "run.total_steps": 10**9, "run.max_run_restarts": 0,
    }  # fmt: skip
    plan, pids, ended = unirl.make_plan("impala", **settings), [], threading.Event()
    killer = threading.Thread(target=kill_ranks, args=(tmp_path / "run", pids, ended, 1))
    killer.start()
    result = unirl.run(plan, tmp_path / "run", console=False)
    killer.join()
    assert (result.reason, len(pids)) == ("interrupted", 1)
    assert result.scalars["faults/rank_restarts"] == 1
    assert "faults/actor_restarts" not in result.scalars
    assert result.scalars["staleness/max"] <= plan.learner.queue.max_staleness
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] == result.num_steps
    records = [(each["event"], each.get("member")) for each in read_events(tmp_path / "run")]
    assert records.count(("started", "rank 1")) == records.count(("restarted", "rank 1")) == 1
    assert ("died", "rank 1") in records and records.count(("started", "run")) == 1
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_ranks_that_die_too_often_end_the_learner_which_continues_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    settings = {
        **UNROLLS, "learner.ranks": 2, "run.total_steps": 10**9, "run.log_seconds": 0.0,
        "runner.max_restarts": 1, "run.max_run_restarts": 1,
    }  # fmt: skip
    plan, pids = unirl.make_plan("impala", **settings), []
    ended = threading.Event()
    work = (tmp_path / "run", pids, ended)
    killer = threading.Thread(target=kill_ranks, args=work, daemon=True)
    killer.start()
    with pytest.raises(RunLost, match="rank 1 of 2") as error:
        unirl.run(plan, tmp_path / "run", console=False)
    ended.set()
    killer.join()
    assert len(error.value.parts) == 3 and len(pids) == 4
    # The weights were whole in the first rank, too.
    state = load_checkpoint(tmp_path / "run").state
    assert state["version"] >= 2
    steps = int(str(state["num_steps"])) + 300
    again = unirl.make_plan("impala", **{**settings, "run.total_steps": steps})
    result = unirl.run(again, tmp_path / "run", resume=tmp_path / "run", console=False)
    assert result.num_steps >= steps and result.version > int(str(state["version"]))
    assert not multiprocessing.active_children()


def kill_ranks(run_dir: Path, pids: list[int], ended: threading.Event, most: int = 99) -> None:
    """Each that is started, as soon as it trains; then the run is interrupted."""
    rows, have = run_dir / "metrics.jsonl", 0
    while not ended.wait(0.05):
        if not rows.exists() or (number := rows.read_text().count("\n")) < have + 3:
            continue
        if len(pids) == most:
            os.kill(os.getpid(), signal.SIGINT)
            return
        found = re.findall(r"rank 1 is process (\d+)", (run_dir / "log.txt").read_text())
        if int(found[-1]) not in pids:
            pids.append(int(found[-1]))
            os.kill(pids[-1], signal.SIGKILL)
            have = number


@pytest.mark.parametrize("batch", [3, 5])
def test_a_batch_that_does_not_split_is_refused(batch: int) -> None:
    with pytest.raises(UniRLError, match=r"learner\.ranks is 2") as error:
        unirl.make_plan("impala", **{**UNROLLS, "queue.batch_size": batch, "learner.ranks": 2})
    assert f"set queue.batch_size to {batch + 1}" in error.value.parts[2]
