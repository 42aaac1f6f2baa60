"""A run of agents is killed between its checkpoints: its store says of every ticket that it was
learned from once, at the update that did so.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests import forked
from tests.system.grpo_faults import account, learned, session
from tests.test_docs import is_documented
from tests.tiny_calculator import PLAYED
from unirl import cli
from unirl.core.actor import ActorContext, AnyActor
from unirl.llm.agents.rollout import AgentRollout
from unirl.llm.models.tiny import make_tiny
from unirl.llm.sandbox.box import SandboxCounts
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.store import open_store
from unirl.storage.checkpoint import load_checkpoint

GROUP, BATCH, CHECKPOINT = 2, 2, 120
DEADLINE_SECONDS = 120.0
SETTINGS: dict[str, Any] = {
    **PLAYED,
    "reward.weights": {"characters": 1.0},
    "sampling.max_tokens": 4,
    "rollout.group_size": GROUP,
    "queue.batch_size": BATCH,
    "queue.timeout_seconds": 60.0,
    "agent.episode_seconds": 50.0,
    "run.log_seconds": 0.0,
    "run.checkpoint_steps": CHECKPOINT * BATCH * GROUP,
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def marks(run_dir: Path) -> dict[int, int]:
    """Update by ticket, as the store has it."""
    with closing(open_store(StoreConfig(), run_dir, create=False)) as store:
        return dict(store.database.execute("SELECT ticket, update_number FROM lease"))


def at_checkpoint(run_dir: Path) -> int:
    """Updates before the newest checkpoint; 0: there is none."""
    found = run_dir / "checkpoints" / "latest"
    if not found.exists():
        return 0
    return int(found.resolve().name.removeprefix("step_")) // (BATCH * GROUP)


def newest(run_dir: Path) -> int:
    """The last update that marked something; 0: there is none."""
    if not (run_dir / FILE).exists():
        return 0
    with closing(sqlite3.connect(run_dir / FILE)) as file:
        with contextlib.suppress(sqlite3.OperationalError):  # its tables are being made
            return int(file.execute("SELECT MAX(update_number) FROM lease").fetchone()[0] or 0)
        return 0


def learned_at(run_dir: Path) -> dict[int, int]:
    """Update by ticket, as the learner's own samples have it."""
    return {ticket: 1 + number // BATCH for number, ticket in enumerate(learned(run_dir))}


def until(held: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not held():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_what_store_and_sandboxes_do_is_in_the_rows(tmp_path: Path) -> None:
    model, boxes = str(make_tiny(tmp_path / "tiny", width=32, layers=1)), SandboxCounts()
    settings: dict[str, Any] = {"model.path": model, "run.total_steps": 6 * BATCH * GROUP}
    settings["run.checkpoint_steps"] = 2 * BATCH * GROUP  # at which marks are written
    plan = unirl.make_plan("agent", **{**SETTINGS, **settings})

    def make(context: ActorContext, **rest: Any) -> AnyActor:
        actor = plan.pools[0].make_actor(context, **rest)  # type: ignore[call-arg]
        assert isinstance(actor, AgentRollout)
        actor.boxes = boxes
        boxes.starts, boxes.refusals, boxes.seconds = 4, 1, 2.5
        return actor

    unirl.run(plan.with_pool(make_actor=make), tmp_path / "run", console=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    last = rows[-1]
    names = {name for row in rows for name in row if name.startswith(("store/", "sandbox/"))}
    assert {
        "store/episodes", "store/bytes", "store/queued", "store/dropped_bodies", "store/failed",
        "store/duplicates", "store/expired", "store/redacted", "store/marked",
        "sandbox/starts", "sandbox/refusals",
    } <= names  # fmt: skip
    assert not [name for name in names if not is_documented(name)]
    # The newest batch was written after its rows were counted.
    assert 4 * BATCH * GROUP <= last["store/episodes"] <= 6 * BATCH * GROUP
    assert last["store/bytes"] > 100 * last["store/episodes"] and last["store/failed"] == 0
    assert last["sandbox/starts"] == 4 and last["sandbox/refusals"] == 1
    assert sum(row.get("time/sandbox", 0.0) for row in rows) == 2.5


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_each_ticket_is_marked_once_however_the_run_was_killed(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_tiny(tmp_path / "tiny", width=32, layers=1))
    settings = {"mode": mode, "model.path": model, "run.total_steps": 10**9}
    # None is discarded as too old: each that is begun is learned from.
    settings["queue.window"] = 1 if mode == "async" else None
    plan = unirl.make_plan("agent", **{**SETTINGS, **settings})
    config, run_dir = tmp_path / "config.toml", tmp_path / "runs" / "killed"
    config.write_text(unirl.config.to_toml(plan.config, recipe="agent"))
    monkeypatch.chdir(tmp_path)
    words, output = ["train", "agent", f"@{config}", "--name", "killed"], tmp_path / "output.txt"
    process = forked.start(cli.main, [*words, "--no-console"], output=output)
    try:
        # Marks of later updates than a checkpoint's are written, and the next one is not near.
        until(
            lambda: (
                not process.is_alive()
                or (
                    (saved := at_checkpoint(run_dir)) > 0
                    and saved < newest(run_dir) < saved + CHECKPOINT // 2
                )
            ),
            "no marks behind a checkpoint",
        )
        assert process.is_alive(), output.read_text()
    finally:
        process.kill()
        process.join()
    until(lambda: not session(process), "processes outlive their learner")
    saved, marked = int(load_checkpoint(run_dir).state["version"]), marks(run_dir)
    assert set(range(1, saved + 1)) <= set(marked.values()), "a checkpoint is ahead of the ledger"
    assert max(marked.values()) > saved
    updates = saved + 20
    words = ["resume", str(run_dir), "--run.total-steps", str(updates * BATCH * GROUP)]
    process = forked.start(cli.main, [*words, "--no-console"], output=output)
    process.join(DEADLINE_SECONDS)
    assert process.exitcode == 0, output.read_text()
    there, missing = account(run_dir)
    assert len(there) == len(set(there)) and not missing
    assert marks(run_dir) == learned_at(run_dir) and len(marks(run_dir)) == updates * BATCH
    with closing(open_store(StoreConfig(), run_dir, create=False)) as store:
        rows = store.find(limit=10**6)
    trained = [(row["ticket"], row["place"]) for row in rows if row["state"] == "trained"]
    assert len(set(trained)) == len(trained) == updates * BATCH * GROUP
    found = {row["ticket"]: row["trained_version"] for row in rows if row["state"] == "trained"}
    assert found == learned_at(run_dir)
