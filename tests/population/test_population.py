"""Populations: the worst learn from the best, and a run continues as it would have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import unirl
from unirl import cli
from unirl.core.tree import leaves
from unirl.errors import UniRLError
from unirl.population.config import PopulationConfig
from unirl.population.explore import explored
from unirl.run_events import read_events
from unirl.search_space import Choices, Range
from unirl.storage.checkpoint import load_checkpoint

LR = "learner.optimizer.lr"
VARY = {LR: {"low": 1e-6, "high": 1e-1, "log": True}}
SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 8,
    "actor.unroll_length": 16,
    "policy.hidden": (16,),
    "queue.max_staleness": 0,
    "runner.learner_threads": 1,
    "run.log_seconds": 0.0,
    "run.total_steps": 4_000,
    "population.size": 4,
    "population.every_steps": 500,
    "population.episodes": 5,
    "population.vary": VARY,
}


def folders(run_dir: Path) -> list[Path]:
    return [run_dir, *(run_dir / "policies" / str(index) for index in (1, 2, 3))]


def copies(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_events(run_dir) if row["event"] == "copied"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A population that was trained in one process."""
    run_dir = tmp_path_factory.mktemp("population") / "run"
    settings = {**SMALL, "run.checkpoint_steps": 1_500, "run.keep_checkpoints": 9}
    unirl.run(unirl.make_plan("impala", **settings), run_dir, console=False)
    return run_dir


def test_learners_copy_the_best_and_it_is_on_record(trained: Path) -> None:
    found = copies(trained)
    assert found
    for row in found:
        assert row["learner"] != row["from"] and row["score"] < row["score_of"]
        assert 1e-6 <= row["settings"][LR] <= 1e-1
        index = int(row["learner"].removeprefix("learner-"))
        state = load_checkpoint(folders(trained)[index]).state
        assert state["counters"]["tuned"].keys() == {LR}
    rows = [json.loads(line) for line in (trained / "policies/2/metrics.jsonl").open()]
    assert all(f"population/{LR}" in row for row in rows)


def test_a_run_that_was_killed_repeats_bit_for_bit_what_it_would_have_done(
    trained: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy, symlinks=True)
    steps = []
    for folder in folders(copy):  # as of the second checkpoint, which is of one moment
        saved = sorted((folder / "checkpoints").glob("step_*"))
        for path in saved[2:]:
            shutil.rmtree(path)
        link = folder / "checkpoints" / "latest"
        link.unlink()
        link.symlink_to(saved[1].name)
        steps.append(load_checkpoint(folder).step)
    begin = max(row["step"] for row in copies(trained) if row["step"] <= min(steps))
    assert any(row["step"] > max(steps) for row in copies(trained)) and begin
    (copy / "events.jsonl").unlink()
    settings = {**SMALL, "run.checkpoint_steps": 1_500, "run.keep_checkpoints": 9}
    unirl.run(unirl.make_plan("impala", **settings), copy, resume=copy, console=False)
    for one, other in zip(folders(trained), folders(copy), strict=True):
        a, b = load_checkpoint(one), load_checkpoint(other)
        assert (a.step, a.state["version"]) == (b.step, b.state["version"])
        assert all(torch.equal(x, dict(leaves(b.model))[path]) for path, x in leaves(a.model))
        assert a.state["counters"] == b.state["counters"]

    def late(run_dir: Path) -> list[dict[str, Any]]:
        rows = [row for row in copies(run_dir) if row["step"] > max(steps)]
        return [{key: row[key] for key in ("learner", "from", "step", "settings")} for row in rows]

    assert late(copy) == late(trained)


def test_the_folder_of_a_learner_is_a_run_of_its_own(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (best, *_) = json.loads((trained / "population.json").read_text())
    assert cli.main(["eval", str(trained / best["folder"]), "--episodes", "2"]) == 0
    assert cli.main(["eval", str(trained / "policies" / "3"), "--episodes", "2"]) == 0


def test_in_processes_learners_copy_while_all_of_them_train(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "runner.kind": "processes",
        "queue.max_staleness": 1,
        "population.size": 2,
        "population.quantile": 0.5,
        "population.vary": {LR: [1e-6, 1e-2]},
        "run.total_steps": 6_000,
    }
    unirl.run(unirl.make_plan("impala", **settings), tmp_path / "run", console=False)
    assert copies(tmp_path / "run")


def test_a_learner_whose_weights_are_no_numbers_continues_as_another(tmp_path: Path) -> None:
    settings = {**SMALL, "population.vary": {LR: [1e-3, 1e30]}, "run.total_steps": 2_000}
    unirl.run(unirl.make_plan("impala", **settings), tmp_path / "run", console=False)
    assert [row for row in copies(tmp_path / "run") if "score" not in row]


@pytest.mark.parametrize("recipe", ["ppo", "appo", "ondevice"])
def test_other_recipes_have_populations_too(recipe: str, tmp_path: Path) -> None:
    small: dict[str, dict[str, Any]] = {
        "ppo": {"env.id": "CartPole-v1", "actor.unroll_length": 16},
        "appo": {"env.id": "CartPole-v1", "runner.kind": "inline"},
        "ondevice": {"env.id": "torch/Cartpole", "sim.num_envs": 32, "policy.hidden": (8,)},
    }
    settings = {
        **small[recipe],
        "learner.optimizer.lr_schedule": "constant",
        "population.size": 2,
        "population.vary": {"learner.policy_clip": [0.1, 0.2], "learner.entropy_coef": [0.0, 0.1]},
        "run.total_steps": 1_000,
    }
    unirl.run(unirl.make_plan(recipe, **settings), tmp_path / "run", console=False)
    rows = json.loads((tmp_path / "run" / "population.json").read_text())
    assert len(rows) == 2 and all(
        row["settings"].keys() == settings["population.vary"].keys() for row in rows
    )


def test_settings_move_within_their_range() -> None:
    space = {"a": Range(0.0, 1.0), "b": Choices((3, 1, 2))}
    config = PopulationConfig(resample=0.0)
    found = [explored({"a": 0.9, "b": 3}, space, config, Random(seed)) for seed in range(40)]
    assert {one["a"] for one in found} == {0.72, 1.0}
    assert {one["b"] for one in found} == {2, 3}
    redrawn = PopulationConfig(resample=1.0)
    assert len({explored({"a": 0.9}, space, redrawn, Random(s))["a"] for s in range(40)}) == 40


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"population.vary": {"learner.gamma": [0.9, 0.99]}}, "learner.entropy_coef"),
        ({"population.vary": {"learner.policy_clip": [0.1, 0.2]}}, "none in the config"),
        ({"population.vary": {LR: {"low": -1.0, "high": 1.0}}}, "learner.optimizer.lr is -1"),
        ({"population.vary": {LR: ["fast"]}}, "learners vary numbers"),
        ({"population.vary": {"learner.optimizer.rl": [1.0]}}, LR),
        ({"population.vary": {}}, "set both"),
        ({"population.size": 1}, "set both"),
        ({"population.quantile": 0.6}, "(0, 0.5]"),
        ({"population.size": 0}, ">= 1"),
    ],
)
def test_what_cannot_be_varied_is_refused(changes: dict[str, Any], words: str) -> None:
    plain = {key: value for key, value in SMALL.items() if key != "population.vary"}
    with pytest.raises(UniRLError) as refused:
        unirl.make_plan("impala", **{**plain, "population.vary": VARY, **changes})
    assert words in str(refused.value), refused.value
    assert len(refused.value.parts) == 3
