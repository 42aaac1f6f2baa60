"""Runs with a network of the user's own: with every recipe and runner, and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from unirl import cli
from unirl.errors import UniRLError
from unirl.runners.cluster.shipping import pack
from unirl.storage.checkpoint import load_checkpoint

SMALL: dict[str, Any] = {"env.id": "CartPole-v1", "actor.num_envs": 4, "run.total_steps": 400}
MEMORY = {"policy.module": "tests.networks:Memory", "policy.core": "own"}
WHOLE = {"policy.module": "tests.networks:Whole"}
TORSO = {"policy.module": "tests.networks:Torso", "policy.kwargs": {"width": 16}}
SAMPLER: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "sampler.num_workers": 1,
    "sampler.num_envs": 8,
    "sampler.unroll_length": 8,
    "learner.minibatches": 1,
    "run.total_steps": 400,
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "impala inline": ("impala", {**SMALL, **MEMORY}),
    "impala processes": ("impala", {**SMALL, **TORSO, "runner.kind": "processes"}),
    "ppo inline": ("ppo", {**SMALL, **WHOLE, "actor.unroll_length": 16}),
    "appo processes": ("appo", {**SAMPLER, **MEMORY}),
    "ondevice": ("ondevice", {"sim.num_envs": 16, "run.total_steps": 600, **TORSO}),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_recipe_trains_it_and_it_is_evaluated(name: str, tmp_path: Path) -> None:
    recipe, settings = RUNS[name]
    plan = unirl.make_plan(recipe, **settings)
    assert unirl.run(plan, tmp_path / "run", console=False).reason == "total_steps"
    assert len(unirl.load(tmp_path / "run").evaluate(2).returns) == 2


def test_a_run_that_was_stopped_and_continued_equals_a_whole_one(tmp_path: Path) -> None:
    def train(folder: str, steps: int, resume: Path | None = None) -> Any:
        settings = {**SMALL, **MEMORY, "run.total_steps": steps, "run.checkpoint_steps": 400}
        plan = unirl.make_plan("impala", **settings)
        unirl.run(plan, tmp_path / folder, console=False, resume=resume)
        return load_checkpoint(tmp_path / folder).model

    whole = train("whole", 800)
    train("parts", 400)
    parts = train("parts", 800, tmp_path / "parts")
    assert whole.keys() == parts.keys() and any("gate" in name for name in whole)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_checkpoint_is_not_continued_with_another_network(tmp_path: Path) -> None:
    unirl.run(unirl.make_plan("impala", **SMALL, **TORSO), tmp_path / "run", console=False)
    for other, message in (
        (WHOLE, r"policy\.module = 'tests\.networks:Torso', this run has 'tests\.networks:Whole'"),
        ({**TORSO, "policy.kwargs": {"width": 8}}, r"policy\.kwargs\.width = 16, this run has 8"),
    ):
        plan = unirl.make_plan("impala", **{**SMALL, **other, "run.total_steps": 800})
        with pytest.raises(UniRLError, match=message):
            unirl.run(plan, tmp_path / "run", console=False, resume=tmp_path / "run")


def test_it_learns_what_needs_a_memory(tmp_path: Path) -> None:
    settings = {
        "env.id": "unirl/RecallCue-v0",
        "env.kwargs": {"length": 4},
        "actor.num_envs": 32,
        "actor.unroll_length": 8,
        "learner.optimizer.lr": 5e-3,
        "learner.gamma": 0.95,
        "run.total_steps": 200_000,
        "run.target_return": 0.9,
    }
    plan = unirl.make_plan("impala", **settings, **MEMORY)
    assert unirl.run(plan, tmp_path / "run", console=False).reason == "target_return"


def test_nodes_of_a_cluster_are_sent_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = Path(__file__).resolve().parents[1] / "networks.py"
    (tmp_path / "my_networks_for_test.py").write_text(networks.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    unirl.make_plan("impala", **SMALL, **{"policy.module": "my_networks_for_test:Torso"})
    parcel = pack("")
    assert parcel is not None
    assert str(tmp_path / "my_networks_for_test.py") in {path for path, _, _ in parcel.files}


BAD = {
    "policy.module": ("tests.networks:Tors", 'did you mean "Torso"?'),
    "policy.module ": ("no_such_module:Net", 'there is no module "no_such_module"'),
    "policy.module  ": ("tests.networks:BatchNorm", "other numbers"),
    "policy.module   ": ("Net", "it must be module:Class"),
    "learner.optimizer.lr_schedule": ("tests.schedules:negative", "returned -0.01"),
    "learner.optimizer.lr_schedule ": ("liner", 'did you mean "linear"?'),
    "learner.entropy_schedule": ("tests.schedules:wordy", "must return a number"),
}


@pytest.mark.parametrize("key", BAD)
def test_bad_names_end_the_command_with_2_and_three_parts(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, message = BAD[key]
    words = ["train", "impala", f"--{key.strip()}", value, "--runs-dir", str(tmp_path)]
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and message in "\n".join(lines)
    assert not list(tmp_path.iterdir())


def test_the_command_line_takes_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    module = ["--policy.module", "tests.networks:Torso", "--policy.kwargs.width", "8"]
    assert cli.main(["train", "impala", *module, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert 'module = "tests.networks:Torso"' in printed and "width = 8" in printed
