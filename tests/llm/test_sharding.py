"""A model divided among two processes learns what a whole one does, and is saved whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.forked import in_two_ranks
from tests.llm.packed_groups import make_model
from tests.llm.test_learner import batch_of, close, make_learner, moved
from tests.llm.test_ranks import CASES, copied, groups_of
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.parallel import Ranks
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.models.lora import add_adapters
from unirl.llm.models.model import ModelConfig
from unirl.llm.training.learner import LlmLearner
from unirl.llm.training.sharding import shard

# A large epsilon: where there is hardly a gradient, Adam would make steps of its rounding.
ADAM: dict[str, Any] = {
    "optimizer": OptimizerConfig(lr=0.01, max_grad_norm=0.5, epsilon=1e-3),
    "epochs": 2,
}
EVERY = [*CASES, "idle", "recomputed", "adapters", "no limit"]


def adapted() -> Any:
    torch.manual_seed(2)
    model = add_adapters(make_model(dtype=torch.float32), ModelConfig(lora_rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    return model


def recomputing() -> Any:
    model = make_model(dtype=torch.float32).requires_grad_(True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def learner_of(
    ranks: Ranks | None, algorithm: AlgorithmConfig | None = None, **settings: Any
) -> LlmLearner:
    """Divided where there are others."""
    dtype = settings.pop("dtype", torch.float32)
    if ranks is not None:
        settings |= {"ranks": ranks, "prepare": partial(shard, ranks=ranks)}
    return make_learner(algorithm, dtype=dtype, **settings)


def outcome(ranks: Ranks | None, rank: int | None) -> dict[str, Any]:
    """What a process finds, of all kinds."""
    found: dict[str, Any] = {}
    for name, algorithm in CASES.items():
        found[name] = moved(learner_of(ranks, algorithm), groups_of(rank))
    found["idle"] = moved(learner_of(ranks), groups_of(rank, idle=True))
    # One rank has many more packs than the other.
    found["no limit"] = moved(learner_of(ranks, micro_tokens=9), groups_of(rank, idle=True))
    found["recomputed"] = moved(learner_of(ranks, model=recomputing()), groups_of(rank))
    found["adapters"] = moved(learner_of(ranks, model=adapted()), groups_of(rank))
    adapters = learner_of(ranks, model=adapted())
    found["merged"] = dict(adapters.weights())
    low = learner_of(ranks, dtype=torch.bfloat16)
    found["bfloat16"] = moved(low, groups_of(rank))
    found["bfloat16 weights"] = dict(low.weights())
    learner = learner_of(ranks, **ADAM)
    for update in range(3):
        learner.step(batch_of(groups_of(rank, update), update))
    found["state"] = copied(learner.state_dict())
    found["weights"] = {key: value.clone() for key, value in learner.weights().items()}
    for update in range(3, 5):
        learner.step(batch_of(groups_of(rank, update), update))
    found["continued"] = {key: value.clone() for key, value in learner.weights().items()}
    return found


def work(folder: Path) -> None:
    """What each of the two processes does."""
    ranks = Ranks.from_environment()
    with ranks.joined(60.0):
        found = outcome(ranks, ranks.rank)
        again = learner_of(ranks, **ADAM)
        again.load_state_dict(torch.load(folder / "alone.pt", weights_only=False))
        again.version, again.num_steps = 3, 48
        found["read again"] = copied(again.state_dict())
        for update in range(3, 5):
            again.step(batch_of(groups_of(ranks.rank, update), update))
        found["resumed"] = dict(again.weights())
        parts: Any = again.policy.parameters()
        found["held"] = sum(each.to_local().numel() for each in parts)
    torch.save(found, folder / f"{ranks.rank}.pt")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process comes to with all groups and the whole model."""
    return outcome(None, None)


@pytest.fixture(scope="module")
def found(alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes came to, by rank."""
    folder = tmp_path_factory.mktemp("sharding")
    torch.save(alone["state"], folder / "alone.pt")
    in_two_ranks(work, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {prefix: tree}
    return {k: v for key, child in tree.items() for k, v in flat(child, f"{prefix}/{key}").items()}


@pytest.mark.parametrize("name", EVERY)
def test_a_divided_model_makes_the_gradient_of_the_whole_one(
    found: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    close(alone[name], found[0][name], 1e-5)
    assert all(torch.equal(value, found[1][name][key]) for key, value in found[0][name].items())


def test_each_process_holds_half(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    total = sum(value.numel() for value in alone["weights"].values())
    assert sum(result["held"] for result in found) == total
    assert max(result["held"] for result in found) < 0.51 * total


def test_a_checkpoint_is_that_of_the_whole_model(
    found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    wanted = flat({"model": alone["state"].model, "optimizer": alone["state"].optimizer})
    for result in found:
        state = flat({"model": result["state"].model, "optimizer": result["state"].optimizer})
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert state[key].shape == value.shape and state[key].dtype == value.dtype, key
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_the_checkpoint_of_one_process_is_continued_by_two(
    found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    wanted = flat({"model": alone["state"].model, "optimizer": alone["state"].optimizer})
    for result in found:
        again = result["read again"]
        read = flat({"model": again.model, "optimizer": again.optimizer})
        assert all(torch.equal(value, read[key]) for key, value in wanted.items())
        for key, value in alone["continued"].items():
            torch.testing.assert_close(result["resumed"][key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_engines_get_the_whole_model(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for result in found:
        for key, value in alone["merged"].items():
            torch.testing.assert_close(result["merged"][key], value, rtol=0, atol=1e-6, msg=key)
        assert result["weights"].keys() == alone["weights"].keys()


def test_bfloat16_is_computed_over_parts_in_full_precision(
    found: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    exact, divided = alone["unirl:grpo"], found[0]["bfloat16"]
    norm = sum(float(value.square().sum()) for value in exact.values()) ** 0.5
    wrong = sum(float((divided[name] - exact[name]).square().sum()) for name in exact) ** 0.5
    assert all(value.dtype == torch.float32 for value in divided.values())
    assert wrong < 0.1 * norm
    weights = found[0]["bfloat16 weights"]
    assert all(value.dtype == torch.bfloat16 for value in weights.values())
