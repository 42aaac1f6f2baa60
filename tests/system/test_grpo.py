"""GRPO through the real recipe: a tiny model learns, samples are no older than allowed, and a
resumed run continues as the whole one.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.system.grpo_settings import SMALL
from unirl.core.tree import flatten
from unirl.llm.models.tiny import make_tiny
from unirl.storage.checkpoint import load_checkpoint

GROUP, BATCH = 8, 4
BASE: dict[str, Any] = {**SMALL, "rollout.group_size": GROUP, "queue.batch_size": BATCH}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", width=64, layers=2))


def train(
    model: str, run_dir: Path, *, updates: int, resume: Path | None = None, **overrides: Any
) -> unirl.RunResult:
    settings = {**BASE, "model.path": model, "run.total_steps": updates * BATCH * GROUP}
    plan = unirl.make_plan("grpo", **{**settings, **overrides})
    return unirl.run(plan, run_dir, resume=resume, console=False)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def learned(run_dir: Path) -> list[int]:
    """Tickets in the order in which they were learned; each counts once per update it is in."""
    samples = rows(run_dir / "samples" / "samples.jsonl")
    groups = dict.fromkeys((row["update"], row["ticket"]) for row in samples)
    assert len(samples) == GROUP * len(groups)
    return [ticket for _, ticket in groups]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tiny_model_learns_what_an_untrained_one_cannot_do(
    model: str, seed: int, tmp_path: Path
) -> None:
    result = train(
        model,
        tmp_path / "run",
        updates=150,
        **{
            "queue.batch_size": 16,
            "run.total_steps": 20_000,
            "run.seed": seed,
            "run.target_return": 0.8,
            "run.target_window": 256,
            "task.num_eval": 4,
            "run.eval_steps": 1024,
            "run.eval_episodes": 32,
        },
    )
    assert result.reason == "target_return" and result.scalars["staleness/token_max"] == 0
    # 128 completions per update: evaluated at every eighth, on digits that are never trained on.
    evaluations = sorted((tmp_path / "run" / "eval").glob("step_*.json"))
    first = json.loads(evaluations[0].read_text())
    assert first["step"] == 1024 and first["num_episodes"] == 32
    assert all(0 <= reward <= 1 for reward in first["returns"])
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["reward"] < 0.1 < 0.7 < metrics[-1]["reward"]


@pytest.mark.parametrize(
    ("mode", "bound", "settings"),
    [
        ("sync", 0, {}),
        ("colocated", 0, {}),
        ("partial", 2, {"queue.max_staleness": 2}),
        ("one-step-off", 1, {}),
        ("async", 2, {"queue.max_staleness": 2}),
    ],
    ids=["sync", "colocated", "partial", "one-step-off", "async"],
)
def test_no_token_is_older_than_the_mode_allows(
    model: str, mode: str, bound: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    result = train(model, tmp_path / "run", updates=12, mode=mode, **settings)
    assert result.version == 12
    samples = rows(tmp_path / "run" / "samples" / "samples.jsonl")
    # Update n is made from version n - 1.
    ages = [row["update"] - 1 - version for row in samples for version in row["versions"]]
    assert len(samples) == 12 * BATCH * GROUP and 0 <= min(ages) <= max(ages) <= bound
    shown = [row["staleness/token_max"] for row in rows(tmp_path / "run" / "metrics.jsonl")]
    assert shown and max(shown) <= bound
    assert bound == 0 or max(ages) > 0  # generation and learning did overlap
    tickets = learned(tmp_path / "run")
    assert len(tickets) == len(set(tickets)) == 12 * BATCH
    assert not multiprocessing.active_children()


def test_in_mode_partial_a_tail_is_continued_under_newer_weights(
    model: str, tmp_path: Path
) -> None:
    # Room for three groups and a half: twelve are asked for, so the fourth of a batch ends later.
    settings = {
        "mode": "partial",
        "queue.max_staleness": 2,
        "sampling.max_tokens": 40,
        "engine.max_sequences": 28,
    }
    result = train(model, tmp_path / "run", updates=16, **settings)
    samples = rows(tmp_path / "run" / "samples" / "samples.jsonl")
    mixed = [row for row in samples if len(row["versions"]) > 1]
    assert mixed and result.scalars["staleness/token_max"] <= 2
    tickets = learned(tmp_path / "run")
    assert len(tickets) == len(set(tickets)) == 16 * BATCH


@pytest.mark.parametrize("mode", ["sync", "colocated", "partial"])
def test_a_resumed_run_equals_the_whole_one_bit_for_bit(
    model: str, mode: str, tmp_path: Path
) -> None:
    settings = {"run.checkpoint_steps": 3 * BATCH * GROUP, "mode": mode}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(model, whole, updates=6, **settings)
    train(model, parts, updates=3, **settings)
    train(model, parts, updates=6, resume=parts, **settings)
    one, other = load_checkpoint(whole), load_checkpoint(parts)
    assert one.state["version"] == other.state["version"] == 6
    for key in ("next_ticket", "due", "num_steps"):
        assert one.state[key] == other.state[key], key
    moved = False
    begin = flatten(load_checkpoint(min((whole / "checkpoints").glob("step_*"))).model)
    for part in ("model", "optimizer"):
        first, second = flatten(getattr(one, part)), flatten(getattr(other, part))
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(value, second[name]), name
            moved = moved or (part == "model" and not torch.equal(value, begin[name]))
    assert moved
    samples = [run_dir / "samples" / "samples.jsonl" for run_dir in (whole, parts)]
    assert rows(samples[0]) == rows(samples[1])


@pytest.mark.parametrize("window", [1, None])
def test_an_async_run_issues_again_what_was_in_flight(
    model: str, window: int | None, tmp_path: Path
) -> None:
    settings = {"mode": "async", "queue.max_staleness": 2, "queue.window": window}
    run_dir, stale = tmp_path / "run", 0  # counted since the run began
    for resume in (None, run_dir):
        updates = 5 if resume is None else 10
        result = train(model, run_dir, updates=updates, resume=resume, **settings)
        stale = int(result.scalars.get("queue/discarded/stale", 0))
        assert result.scalars["staleness/token_max"] <= 2
    state = load_checkpoint(run_dir).state
    waiting = [note["ticket"] for note in state["ready"]]
    waiting += [number for number, _, _ in state["due"]]
    assert waiting  # slots are never empty in this mode
    counts = Counter(learned(run_dir) + waiting)
    assert max(counts.values()) == 1
    missing = set(range(state["next_ticket"])) - counts.keys()
    assert len(missing) == stale and (window is None or not missing)


def test_samples_say_what_was_asked_answered_and_rewarded(model: str, tmp_path: Path) -> None:
    train(model, tmp_path / "run", updates=2)
    for row in rows(tmp_path / "run" / "samples" / "samples.jsonl"):
        assert row["prompt"].endswith("=") and row["outcome"] == [0]
        assert 1 <= row["tokens"] <= 4 and row["finish"] in ("stop", "length")
        asked, answer = row["prompt"][0], row["completion"].removesuffix("<eos>")
        assert (row["reward"] == [1.0]) == (answer == asked) or 0 < row["reward"][0] < 1


def test_a_teacher_without_reward_needs_one_completion_per_prompt(
    model: str, tmp_path: Path
) -> None:
    teacher = make_tiny(tmp_path / "teacher", seed=7, width=64, layers=2)
    settings = {"rollout.group_size": 1, "teacher.path": str(teacher), "teacher.alone": True}
    result = train(model, tmp_path / "run", updates=1, **settings)
    assert result.num_steps == GROUP * BATCH and result.version == GROUP
    shown = [row["kl_to_teacher"] for row in rows(tmp_path / "run" / "metrics.jsonl")]
    assert shown and min(shown) > 0
