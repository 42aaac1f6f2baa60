"""A process of an async environment that dies costs one restart of its actor, not the training."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import unirl

ENV = """
import os, signal, time
from pathlib import Path

import gymnasium
from tests.toy_envs import Fault


class BreaksOnce(Fault):
    # Of all environments that are given the same file, the first one to get there breaks.

    def __init__(self, mark, how):
        super().__init__()
        self.mark, self.how = Path(mark), how

    def step(self, action):
        if self._step == 50:
            try:
                self.mark.touch(exist_ok=False)
            except FileExistsError:
                return super().step(action)
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return super().step(action)


gymnasium.register("test/BreaksOnce-v0", BreaksOnce)
"""


@pytest.mark.parametrize(
    ("runner", "how"), [("inline", "dies"), ("inline", "hangs"), ("processes", "dies")]
)
def test_one_crash_is_one_restart_and_training_continues(
    runner: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaking_envs_for_test.py").write_text(ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings: dict[str, Any] = {
        "env.id": "test/BreaksOnce-v0",
        "env.engine": "async",
        "env.import_module": "breaking_envs_for_test",
        "env.kwargs": {"mark": str(tmp_path / "broke"), "how": how},
        "env.step_timeout": 2.0,
        "actor.num_envs": 2,
        "actor.unroll_length": 8,
        "policy.hidden": (8,),
        "queue.max_staleness": 1,
        "runner.kind": runner,
        "run.total_steps": 400,
        "run.log_seconds": 0.0,
    }
    result = unirl.run(unirl.make_plan("impala", **settings), tmp_path / "run", console=False)
    assert result.reason == "total_steps"
    assert (tmp_path / "broke").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert max(row.get("faults/actor_restarts", 0) for row in rows) == 1
    assert not multiprocessing.active_children()
