"""Agents through the real recipe: a tiny model finds the form of a call, episodes are kept, a
resumed run continues as the whole one, and a program is an agent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.llm.agents import agent_code
from tests.tiny_calculator import PAID
from unirl.core.tree import flatten
from unirl.llm.agents.command import _passed
from unirl.llm.models.tiny import make_tiny
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.store import open_store
from unirl.storage.checkpoint import load_checkpoint

CALCULATOR: dict[str, Any] = {
    **PAID,
    "queue.batch_size": 4,
    "run.log_seconds": 1.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", width=64, layers=2))


def train(
    model: str, run_dir: Path, updates: int, resume: Path | None = None, **overrides: Any
) -> unirl.RunResult:
    settings = {**CALCULATOR, "model.path": model, "run.total_steps": updates * 32}
    plan = unirl.make_plan("agent", **{**settings, **overrides})
    return unirl.run(plan, run_dir, resume=resume, console=False)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def test_a_tiny_model_finds_the_form_of_a_call(model: str, tmp_path: Path) -> None:
    settings = {"queue.batch_size": 16, "algorithm.entropy_coef": 0.05, "run.total_steps": 3072}
    settings["run.log_seconds"] = 0.0  # the first update has a row of its own
    train(model, tmp_path / "run", 0, **settings)
    found = [row for row in rows(tmp_path / "run") if "rewards/steps/mean" in row]
    first, last = found[0], found[-1]
    assert first["rewards/steps/mean"] < 0.5
    assert last["rewards/steps/mean"] > 1.0  # tokens in their places
    assert 0 < last["perf/engine_busy"] < 1
    assert last["agent/calls"] > 0.8 > 0.2 > first["agent/calls"]
    assert last["agent/ending/infrastructure"] == last["agent/ending/crash"] == 0
    store = open_store(StoreConfig(), tmp_path / "run", create=False)
    try:
        assert store.count() == 3072
        # Beyond store.max_bodies that wait, tokens and texts are dropped.
        whole = [row for row in store.find(limit=3072) if row["body_size"] is not None]
        record = store.get(int(whole[0]["id"]))
    finally:
        store.close()
    assert record.task == "products" and record.episode.turns
    assert (tmp_path / "run" / FILE).stat().st_mode & 0o077 == 0


def test_a_resumed_run_continues_as_the_whole_one(model: str, tmp_path: Path) -> None:
    train(model, tmp_path / "whole", 4)
    train(model, tmp_path / "part", 2)
    train(model, tmp_path / "part", 4, resume=tmp_path / "part")
    one, other = (flatten(load_checkpoint(tmp_path / name).model) for name in ("whole", "part"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_group_that_failed_by_itself_is_discarded_and_the_run_continues(
    model: str, tmp_path: Path
) -> None:
    settings = {
        "agent.tools": (),
        "agent.function": "tests.llm.agents.agent_code:fails_once",
        "agent.process_reward": "",
        "agent.retries": 0,
        "rollout.group_size": 2,
    }
    agent_code.FAILURES.clear()
    result = train(model, tmp_path / "run", 1, **settings)
    assert result.reason == "total_steps"
    assert rows(tmp_path / "run")[-1]["queue/discarded/infrastructure"] == 1


PROGRAM = """
import json, os, urllib.request
task = json.loads(os.environ["UNIRL_TASK"])
body = json.dumps({"model": "any", "messages": task["messages"]}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    body,
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert answer["choices"][0]["message"]["role"] == "assistant"
if task["index"] % 7 == 0:
    raise SystemExit("a program that fails")
"""


def test_a_program_is_an_agent(model: str, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the endpoint needs the extra agents")
    (tmp_path / "agent.py").write_text(PROGRAM)
    settings = {
        "agent.tools": (),
        "agent.process_reward": "",
        "agent.credit": "outcome",
        "agent.command": f"{sys.executable} {tmp_path / 'agent.py'}",
        "reward.weights": {"characters": 1.0},
        "rollout.group_size": 2,
        "queue.batch_size": 4,
    }
    train(model, tmp_path / "run", 1, **{**settings, "run.total_steps": 8})
    last = rows(tmp_path / "run")[-1]
    assert last["agent/turns"] == 1.0
    assert last["agent/ending/stop"] + last["agent/ending/crash"] == 1.0


def test_a_long_task_is_passed_in_a_file_that_others_cannot_read() -> None:
    with _passed('"short"') as found:
        assert found == {"UNIRL_TASK": '"short"'}
    long = json.dumps({"text": "é" * 100_000}, ensure_ascii=False)
    with _passed(long) as found:
        path = Path(found["UNIRL_TASK_FILE"])
        assert path.read_text() == long and path.stat().st_mode & 0o077 == 0
    assert not path.exists()
