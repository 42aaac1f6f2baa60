"""Rollouts without learning, learning without rollouts: what one writes the other learns from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.llm.test_learner import groups_with_rewards
from unirl.core.sample import Slot
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.llm.group import read_group
from unirl.llm.saved_samples import Replay, SavedGroups, save_groups
from unirl.storage.checkpoint import load_checkpoint
from unirl.transports.local import LocalWeightStore

SETTINGS: dict[str, Any] = {
    "model.path": "tiny",
    "task.name": "reverse",
    "task.options": {"digits": "1"},
    "task.max_prompt": 16,
    "rollout.group_size": 4,
    "queue.batch_size": 3,
    "sampling.max_tokens": 4,
    "learner.optimizer.lr": 1e-3,
    "learner.entropy": False,
    "reward.weights": {"characters": 1.0, "exact": 0.0},
    "runner.learner_threads": 1,
    "run.total_steps": 2 * 12,
    "run.log_seconds": 0.0,
}


def train(run_dir: Path, *, resume: Path | None = None, **settings: Any) -> unirl.RunResult:
    plan = unirl.make_plan("grpo", **{**SETTINGS, **settings})
    return unirl.run(plan, run_dir, resume=resume, console=False)


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that only rolled out, in two parts: four batches of three groups."""
    run_dir = tmp_path_factory.mktemp("rollout") / "run"
    train(run_dir, only="rollout")
    train(run_dir, only="rollout", resume=run_dir, **{"run.total_steps": 4 * 12})
    return run_dir


def test_all_groups_are_written_and_nothing_is_learned(rolled_out: Path) -> None:
    folder = rolled_out / "samples" / "groups"
    assert len(list(folder.glob("*.safetensors"))) == len(list(folder.glob("*.json"))) == 4
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert [ticket for note in notes for ticket in note["tickets"]] == list(range(12))
    saved = SavedGroups.find(rolled_out)
    assert len(saved.locations) == 12 and saved.shape.group_size == 4
    assert saved.rewards == ("characters", "exact")
    checkpoint = load_checkpoint(rolled_out)
    assert checkpoint.model == {} and checkpoint.state["num_steps"] == 48
    group = saved.load(5)
    assert group.size == 4 and bool((group.logp < 0).all()) and bool(group.mask.all())


def test_training_alone_does_what_the_whole_run_does(rolled_out: Path, tmp_path: Path) -> None:
    """The first update: the weights that generated are those that learn."""
    one = {"run.total_steps": 12, "queue.batch_size": 3}
    train(tmp_path / "whole", **one)
    folder = tmp_path / "first"
    folder.mkdir()
    for path in (rolled_out / "samples" / "groups").glob("batch_00000000.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    train(tmp_path / "train", only="train", samples=str(folder), **one)
    whole, replayed = (load_checkpoint(tmp_path / name).model for name in ("whole", "train"))
    assert whole.keys() == replayed.keys()
    for name, value in whole.items():
        # Adam's first step is of full size wherever there is a gradient: rounding shows.
        assert float((value - replayed[name]).abs().max()) < 1e-4, name


def test_a_resumed_training_continues_as_the_whole_one(rolled_out: Path, tmp_path: Path) -> None:
    settings = {"only": "train", "samples": str(rolled_out)}
    train(tmp_path / "whole", **settings, **{"run.total_steps": 48, "run.checkpoint_steps": 24})
    train(tmp_path / "parts", **settings)
    train(tmp_path / "parts", resume=tmp_path / "parts", **settings, **{"run.total_steps": 48})
    whole, parts = (load_checkpoint(tmp_path / name).model for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def test_training_alone_continues_beside_its_actor_too(rolled_out: Path, tmp_path: Path) -> None:
    settings = {"only": "train", "samples": str(rolled_out), "mode": "async"}
    result = train(tmp_path / "run", **settings, **{"queue.max_staleness": 2})
    assert result.num_steps == 24 and result.scalars["staleness/max"] <= 2


def saved_in(folder: Path, **changes: Any) -> SavedGroups:
    """Two batches of four groups."""
    for number in range(2):
        save_groups(
            groups_with_rewards(number),
            folder / f"batch_{number:08d}",
            **{"temperature": 1.0, "rewards": ("test",), "task": "test", **changes},
        )
    return SavedGroups.find(folder)


def test_each_sample_comes_once_per_epoch_also_to_several_ranks(tmp_path: Path) -> None:
    saved = saved_in(tmp_path)
    weights = LocalWeightStore()
    weights.publish({"w": torch.zeros(1)}, 7)
    seen: list[list[tuple[int, ...]]] = []
    for rank in (0, 1):
        actor = Replay(saved, weights, seed=1, ranks=Ranks(rank, 2))
        seen.append([])
        for ticket in range(8):
            slot = Slot(0, ticket, saved.shape.spec().allocate(), pool_ticket=ticket)
            actor.produce(slot)
            group = read_group(slot.data)
            assert slot.first_version == slot.last_version == 7
            assert bool((group.version == 7).all())
            seen[-1].append((*group.prompt.tolist(), *group.token.tolist()))
    for epoch in (slice(0, 4), slice(4, 8)):
        counts = Counter(each for mine in seen for each in mine[epoch])
        assert len(counts) == 8 and set(counts.values()) == {1}
    assert seen[0][:4] != seen[0][4:]


def test_a_group_comes_back_as_it_was(tmp_path: Path) -> None:
    saved, weights = saved_in(tmp_path), LocalWeightStore()
    weights.publish({"w": torch.zeros(1)}, 0)
    wanted = [one for seed in range(2) for one in groups_with_rewards(seed)]
    actor, found = Replay(saved, weights, seed=1, ranks=Ranks()), []
    slot = Slot(0, 0, saved.shape.spec().allocate())
    for slot.pool_ticket in range(8):
        actor.produce(slot)
        found.append(read_group(slot.data).copy())
    for one in wanted:
        (same,) = [each for each in found if each.token.tolist() == one.token.tolist()]
        for name in ("prompt", "logp", "mask", "starts", "finish", "reward", "outcome"):
            assert torch.equal(getattr(same, name), getattr(one, name)), name


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"rollout.group_size": 8}, "rollout.group_size"),
        ({"sampling.max_tokens": 1}, "sampling.max_tokens"),
        ({"sampling.temperature": 0.5}, "sampling.temperature"),
        ({"reward.weights": {"exact": 1.0}}, "reward.weights"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    rolled_out: Path, settings: dict[str, Any], what: str
) -> None:
    given = {**SETTINGS, **settings, "only": "train", "samples": str(rolled_out)}
    with pytest.raises(UniRLError, match=f"do not fit {what}"):
        unirl.make_plan("grpo", **given)


def test_groups_of_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    group = groups_with_rewards()[0]
    group.token[0] = 50_000
    settings: dict[str, Any] = {"temperature": 1.0, "rewards": ("auto",), "task": "reverse"}
    save_groups([group], tmp_path / "batch_0", **settings)
    given = {**SETTINGS, "only": "train", "samples": str(tmp_path), "sampling.max_tokens": 16}
    del given["reward.weights"]
    with pytest.raises(UniRLError, match="token 50000, tiny knows"):
        unirl.make_plan("grpo", **given)


def test_damage_is_named(tmp_path: Path) -> None:
    saved = saved_in(tmp_path)
    path = tmp_path / "batch_00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UniRLError, match=r"batch_00000001.safetensors cannot be read"):
        saved.load(4)
    saved.load(3)
    (tmp_path / "batch_00000000.json").write_text("{}")
    with pytest.raises(UniRLError, match="does not describe saved groups"):
        SavedGroups.find(tmp_path)
    with pytest.raises(UniRLError, match="no saved groups"):
        SavedGroups.find(tmp_path / "nowhere")


@pytest.mark.parametrize("other", [{"temperature": 0.5}, {"task": "other"}])
def test_runs_of_different_settings_are_not_mixed(tmp_path: Path, other: dict[str, Any]) -> None:
    saved_in(tmp_path)
    settings = {"temperature": 1.0, "rewards": ("test",), "task": "test", **other}
    save_groups(groups_with_rewards(), tmp_path / "batch_00000002", **settings)
    with pytest.raises(UniRLError, match=r"does not belong to batch_00000000\.json"):
        SavedGroups.find(tmp_path)


@pytest.mark.parametrize("settings", [{"only": "train"}, {"samples": "x"}])
def test_samples_go_with_training_alone(settings: dict[str, Any]) -> None:
    with pytest.raises(UniRLError, match="nowhere else"):
        unirl.make_plan("grpo", **SETTINGS, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout.filter": "tests.llm.rollout_code:even_prompts"}, "with rollout.filter tests"),
        ({"rollout.function": "tests.llm.rollout_code:two_turns"}, "with rollout.function tests"),
        ({"rollout.zero_variance": "discard"}, "with rollout.zero_variance discard"),
        ({"mode": "colocated"}, "with mode colocated"),
        ({"learner.minibatches": 4}, "learner.minibatches is 4"),
        ({"run.eval_steps": 12, "task.num_eval": 0}, "no held-out prompts"),
        ({"run.eval_steps": 12, "task.name": "copy"}, "evaluations would ask task copy"),
    ],
)
def test_what_training_alone_cannot_do_is_refused(
    rolled_out: Path, settings: dict[str, Any], said: str
) -> None:
    given = {**SETTINGS, "only": "train", "samples": str(rolled_out), **settings}
    with pytest.raises(UniRLError, match=said):
        unirl.make_plan("grpo", **given)


def test_evaluations_ask_the_task_of_the_samples(rolled_out: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"only": "train", "samples": str(rolled_out)}
    result = train(tmp_path / "run", **settings, **{"run.eval_steps": 12, "run.eval_episodes": 4})
    assert result.last_eval is not None and len(result.last_eval.returns) == 4
    # A config that does not evaluate need not name the task, until someone asks.
    plan = unirl.make_plan("grpo", **{**SETTINGS, **settings, "task.name": "copy"})
    assert plan.learner.fingerprint["task"] == "reverse" and plan.learner.make_evaluator is not None
    with pytest.raises(UniRLError, match="the saved groups are of reverse"):
        plan.learner.make_evaluator(1)


def test_groups_of_one_are_written_and_learned_from_where_no_baseline_is_needed(
    tmp_path: Path,
) -> None:
    one = {"rollout.group_size": 1, "run.total_steps": 6}
    train(tmp_path / "rollout", only="rollout", **one)
    samples = {"only": "train", "samples": str(tmp_path / "rollout")}
    with pytest.raises(UniRLError, match="group_size is 1"):
        train(tmp_path / "grpo", **samples, **one)
    teacher = {"teacher.path": "tiny", "teacher.alone": True}
    result = train(tmp_path / "distilled", **samples, **one, **teacher)
    assert result.num_steps == 6 and result.version == 2
