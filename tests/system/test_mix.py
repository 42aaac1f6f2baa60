"""Two language tasks on engines of their own feed one learner, in fixed shares."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import unirl
from tests.system.grpo_settings import SMALL
from unirl.errors import UniRLError
from unirl.llm.models.tiny import make_tiny

GROUP = 4
MIX: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "task.options"},
    "task.name": "reverse",
    "task.max_prompt": 24,
    "reward.weights": {"characters": 1.0},
    "rollout.group_size": GROUP,
    "mix": {"reverse": 3.0, "arithmetic": 1.0},
    "queue.batch_size": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", width=32, layers=1))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_tasks_are_learned_in_their_shares(model: str, mode: str, tmp_path: Path) -> None:
    # Asynchronous, a task may be ahead by what is in flight when the run ends: two or three groups.
    groups = 200 if mode == "async" else 80
    settings = {**MIX, "model.path": model, "mode": mode, "run.total_steps": groups * GROUP}
    result = unirl.run(unirl.make_plan("grpo", **settings), tmp_path, console=False)
    learned = [result.scalars[f"queue/learned/{task}-actor"] for task in MIX["mix"]]
    assert sum(learned) == groups and learned[0] / groups == pytest.approx(0.75, abs=0.02)


def test_two_engines_share_the_prompts_of_one_task(model: str, tmp_path: Path) -> None:
    settings = {**MIX, "mix": {}, "model.path": model, "mode": "async", "num_engines": 2}
    plan = unirl.make_plan("grpo", **{**settings, "run.total_steps": 40 * GROUP})
    unirl.run(plan, tmp_path, console=False)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "actor-000.txt", "actor-001.txt"
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "samples" / "samples.jsonl").open()]
    groups = Counter(row["ticket"] for row in rows)
    assert len(groups) >= 20 and set(groups.values()) <= {1, GROUP}  # nothing is asked twice


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mix": {"arithmetic": 1.0}}, "it must be in the mix"),
        ({"only": "rollout"}, "leave mix out"),
        ({"num_engines": 0}, "num_engines >= 1"),
    ],
)
def test_mixes_that_cannot_be_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UniRLError, match=what) as error:
        unirl.make_plan("grpo", **{**MIX, **changes})
    assert len(error.value.parts) == 3
