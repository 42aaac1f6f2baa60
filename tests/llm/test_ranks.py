"""Two processes that learn from half of the groups each do what one does that learns from all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.forked import in_two_ranks
from tests.llm.test_learner import (
    PLAIN,
    batch_of,
    close,
    groups_with_rewards,
    make_learner,
    moved,
)
from unirl.core.learner import LearnerState
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.parallel import Ranks
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.group import Group

CASES: dict[str, AlgorithmConfig] = {
    "unirl:grpo": AlgorithmConfig(),
    "seq means and entropy": AlgorithmConfig(preset="trl:grpo", entropy_coef=0.01),
    "whitened, KL in the reward": AlgorithmConfig(preset="openrlhf:reinforce++"),
    "critic": AlgorithmConfig(preset="verl:ppo"),
    "critic, bootstrapped": AlgorithmConfig(preset="unirl:vtrace-critic"),
    "KL in the loss": AlgorithmConfig(kl_coef=0.1, kl="k3"),
}
ADAM: dict[str, Any] = {
    "optimizer": OptimizerConfig(lr=0.01, max_grad_norm=0.5),
    "epochs": 2,
    "minibatches": 2,
}


def groups_of(rank: int | None, update: int = 0, *, idle: bool = False) -> list[Group]:
    """What one rank learns from; None: what all do. idle: the second has nothing to learn from."""
    groups = groups_with_rewards(update)
    if idle:
        groups[3].reward.fill_(0.25)
    return groups if rank is None else groups[2 * rank : 2 * rank + 2]


def copied(state: Any) -> Any:
    """A state that a learner no longer writes to."""
    if isinstance(state, LearnerState):
        return LearnerState(copied(state.model), copied(state.optimizer), dict(state.counters))
    if isinstance(state, torch.Tensor):
        return state.clone()
    return {key: copied(value) for key, value in state.items()}


def outcome(ranks: Ranks | None, rank: int | None) -> dict[str, Any]:
    """What a process finds, of all kinds."""
    found: dict[str, Any] = {}
    for name, algorithm in CASES.items():
        learner = make_learner(algorithm, dtype=torch.float32, ranks=ranks)
        found[name] = moved(learner, groups_of(rank))
    learner = make_learner(dtype=torch.float32, ranks=ranks)
    found["idle"] = moved(learner, groups_of(rank, idle=True))
    found["idle, then not"] = moved(learner, groups_of(rank, 1))
    learner = make_learner(ranks=ranks)
    metrics = learner.step(batch_of(groups_of(rank), 0)).flush()
    found["metrics"] = {k: v for k, v in metrics.items() if not k.startswith("perf/")}
    found["steps"], found["returns"] = learner.num_steps, learner.recent_returns
    empty = groups_of(rank)
    for one in empty:
        one.reward.fill_(1.0)
    found["empty steps"] = learner.step(batch_of(empty, 1)).flush()["losses/empty_steps"]
    learner = make_learner(dtype=torch.float32, ranks=ranks, **ADAM)
    for update in range(3):
        learner.step(batch_of(groups_of(rank, update), update))
    adaptive = OptimizerConfig(lr=0.003, lr_schedule="adaptive", target_kl=1e-7)
    following = make_learner(dtype=torch.float32, ranks=ranks, **{**ADAM, "optimizer": adaptive})
    metrics = following.step(batch_of(groups_of(rank))).flush()
    found["adaptive"] = metrics["losses/learning_rate"]
    state = learner.state_dict()
    found["adam"] = copied({"model": state.model, "optimizer": state.optimizer})
    found["counters"] = dict(state.counters)
    return found


def work(folder: Path) -> None:
    """What each of the two processes does."""
    ranks = Ranks.from_environment()
    with ranks.joined(60.0):
        found = outcome(ranks, ranks.rank)
    torch.save(found, folder / f"{ranks.rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes came to, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    in_two_ranks(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process comes to with all groups."""
    return outcome(None, None)


@pytest.mark.parametrize("name", [*CASES, "idle", "idle, then not"])
def test_halves_on_two_ranks_make_the_gradient_of_the_whole(
    found: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    close(alone[name], found[0][name], 1e-5)


def test_both_ranks_hold_the_same_weights_bit_for_bit(found: list[dict[str, Any]]) -> None:
    for name in (*CASES, "idle", "idle, then not"):
        for key, value in found[0][name].items():
            assert torch.equal(value, found[1][name][key]), (name, key)
    assert found[0]["counters"] == found[1]["counters"]
    assert found[0]["adaptive"] == found[1]["adaptive"] < 0.003
    mine, theirs = found[0]["adam"], found[1]["adam"]
    for key, value in mine["model"].items():
        assert torch.equal(value, theirs["model"][key]), key
    for key, tensors in mine["optimizer"]["update"].items():
        for part, value in tensors.items():
            assert torch.equal(value, theirs["optimizer"]["update"][key][part]), (key, part)


def test_metrics_and_counts_are_those_of_all_ranks(
    found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for result in found:
        assert result["steps"] == alone["steps"] == 16
        assert result["returns"] == alone["returns"]
        assert result["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert [result["empty steps"] for result in found] == [1, 1]
    assert PLAIN.lr == alone["metrics"]["losses/learning_rate"]
