"""`unirl scale` while a run trains."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import unirl
from unirl.commands.scale import scale
from unirl.errors import UniRLError
from unirl.run_events import read_events


def test_a_run_gets_more_members_and_fewer_and_refuses_what_its_slots_do_not_allow(
    tmp_path: Path,
) -> None:
    plan = unirl.make_plan(
        "impala",
        **{
            "env.id": "CartPole-v1", "runner.kind": "processes", "actor.num_actors": 1,
            "actor.num_envs": 4, "queue.batch_size": 2, "queue.max_staleness": 1,
            "policy.hidden": (8,), "run.total_steps": 10**9, "run.log_seconds": 0.2,
        },
    )  # fmt: skip
    run_dir, said = tmp_path / "run", []

    def steer() -> None:
        try:
            while not (run_dir / "metrics.jsonl").exists():
                time.sleep(0.05)
            assert scale([str(run_dir), "actor", "3"]) == 0
            with pytest.raises(UniRLError, match="allows 1 to 4") as refused:
                scale([str(run_dir), "actor", "5"])
            said.extend(refused.value.parts)
            with pytest.raises(UniRLError, match="actr"):
                scale([str(run_dir), "actr", "2"])
            while not (run_dir / "logs" / "actor-002.txt").exists():
                time.sleep(0.05)
            assert scale([str(run_dir), "actor", "1"]) == 0
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=steer)
    thread.start()
    result = unirl.run(plan, run_dir, console=False)
    thread.join()
    assert result.reason == "interrupted" and len(said) == 3
    assert "has 3 members from now on" in (run_dir / "log.txt").read_text()
    events = read_events(run_dir)
    assert [row["size"] for row in events if row["event"] == "scaled"] == [3, 1]
    started = [row["member"] for row in events if row["event"] == "started"]
    assert started == ["run", "actor 0", "actor 1", "actor 2"]


def test_what_does_not_train_is_not_scaled(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('recipe = "impala"\n')
    with pytest.raises(UniRLError, match="no run trains"):
        scale([str(tmp_path), "actor", "2"])
    with pytest.raises(UniRLError, match="how many members"):
        scale([str(tmp_path), "actor", "many"])
