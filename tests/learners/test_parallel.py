"""Two processes that learn from half a batch each do what one does that learns from all of it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from tests.forked import in_two_ranks
from unirl.actors.vector import ActorConfig, unroll_spec
from unirl.core.learner import LearnerContext
from unirl.core.sample import Batch, Field, SampleSpec, Slot
from unirl.core.training_budget import ScheduleProgress, TrainingBudget
from unirl.core.tree import leaves
from unirl.device import finish_on_host
from unirl.errors import UniRLError
from unirl.learners.impala import ImpalaLearnerConfig, ImpalaObjective
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.parallel import RankLost, Ranks
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.learners.unroll import UnrollLearner, make_unroll_learner
from unirl.policy import PolicyConfig

SPACES = (Box(-1, 1, (3,), np.float32), Discrete(3))
LENGTH, NUM_ENVS, NUM_UPDATES = 5, 4, 3
CASES = {
    "ppo": (
        PpoObjective,
        PpoLearnerConfig(
            optimizer=OptimizerConfig(
                lr=2e-3, lr_schedule="adaptive", target_kl=1e-4, max_grad_norm=0.1
            ),
            epochs=3,
            minibatches=1,
            normalize_value=True,
            max_nan_states=NUM_UPDATES * 2 * 3,
        ),
    ),
    "impala": (
        ImpalaObjective,
        ImpalaLearnerConfig(
            optimizer=OptimizerConfig(name="rmsprop", lr_schedule="linear"),
            normalize_advantage=True,
            epochs=2,
        ),
    ),
    "ppo in minibatches": (
        PpoObjective,
        PpoLearnerConfig(epochs=2, minibatches=2, shuffle="batch", stop_kl=0.5),
    ),
}


def spec_of(num_envs: int) -> SampleSpec:
    spec = unroll_spec(*SPACES, ActorConfig(1, num_envs, LENGTH), {})
    faults = Field((1,), torch.int64, batch_axis=0)
    return SampleSpec({**spec.fields, "counter/nan_states": faults})


def rank_data(rank: int, update: int) -> Any:
    """The samples of one rank: the second one's are larger, and fewer of them count."""
    generator = torch.Generator().manual_seed(10 * update + rank)
    data: Any = spec_of(NUM_ENVS).allocate()
    data["obs"].normal_(3.0 * rank, 1.0 + rank, generator=generator)
    data["action"].random_(0, 3, generator=generator)
    data["logp"].uniform_(-2, -0.5, generator=generator)
    data["reward"].normal_(rank, 1 + 4 * rank, generator=generator)
    data["mask"][:] = True
    data["mask"][1:, rank:] = torch.rand(LENGTH - 1, NUM_ENVS - rank, generator=generator) < (
        0.9 - 0.5 * rank
    )
    data["terminated"][:-1] = ~data["mask"][1:] & data["mask"][:-1]  # then comes a filler
    data["counter"]["nan_states"][:] = 3
    return data


def joined(update: int) -> Any:
    """The same samples as one batch."""
    of_ranks, spec = [rank_data(rank, update) for rank in (0, 1)], spec_of(2 * NUM_ENVS)
    data: Any = spec.allocate()
    for (path, into), (_, a), (_, b) in zip(*(leaves(x) for x in (data, *of_ranks)), strict=True):
        axis = 0 if path[0] in ("carry", "state") else 1
        into.copy_(a + b if path[0] == "counter" else torch.cat((a, b), axis))
    return data


def learn(case: str, num_envs: int, samples: Any, ranks: Ranks | None = None) -> UnrollLearner:
    objective, config = CASES[case]
    learner = make_unroll_learner(
        LearnerContext(seed=5),
        objective=objective,
        spaces=SPACES,
        policy=PolicyConfig(hidden=(8,), normalize_obs=True),
        spec=spec_of(num_envs),
        learner=config,
        batch_size=1,
        budget=TrainingBudget(1000),
        num_recent=10,
        ranks=ranks,
    )
    for update in range(NUM_UPDATES):
        slot = Slot(0, update, samples(update), first_version=update, last_version=update)
        learner.step(Batch([slot], update))
    return learner


def outcome(learner: UnrollLearner) -> dict[str, Any]:
    state = learner.state_dict()
    counters = {k: state.counters[k] for k in ("adaptive_lr", "nan_states")}
    return {
        "model": state.model,
        "optimizer": {k: v for k, v in state.optimizer.items() if k != "generator"},  # type: ignore[union-attr]
        "counters": {**counters, "num_steps": learner.num_steps},
    }


def work(folder: Path) -> None:
    """What each of the two processes does."""
    ranks, found = Ranks.from_environment(), {}
    with ranks.joined(60.0):
        for case in CASES:
            learner = learn(case, NUM_ENVS, lambda update: rank_data(ranks.rank, update), ranks)
            found[case] = outcome(learner)
        found["dtypes"] = ranks.sum([torch.tensor(2**53 + 1), torch.ones(2, dtype=torch.int32)])
        schedule = ScheduleProgress(TrainingBudget(100, max_seconds=100.0), ranks.leading)
        schedule.record_training_seconds(10.0 + 20.0 * ranks.rank)
        found["left"] = schedule.left(0)
        found["words"] = [
            ranks.first_text(w) for w in (None, "late" if ranks.rank else None, f"r{ranks.rank}")
        ]
        try:
            ranks.require_alike(version="1", weights=f"of rank {ranks.rank}")
        except UniRLError as error:
            found["unlike"] = str(error)
        try:
            # Each rank counts half of what the limit allows, and a little more is lost on rank 1.
            learner = learn("ppo", NUM_ENVS, lambda update: rank_data(ranks.rank, update), ranks)
            data = rank_data(0, 0)
            data["counter"]["nan_states"][:] = ranks.rank
            learner.step(Batch([Slot(0, 9, data, first_version=3, last_version=3)], 3))
        except UniRLError as error:
            found["limit"] = str(error)
    with ranks.joined(60.0):  # rank 1 comes when rank 0 has given up
        if ranks.rank == 1:
            ranks._store.wait(["gave up"], timedelta(seconds=60))
        work = torch.distributed.all_reduce(torch.ones(2), async_op=True)
        if ranks.rank == 0:
            with pytest.raises(RuntimeError) as late:
                finish_on_host(work, 0.3)
            found["late"] = str(late.value)
            ranks._store.set("gave up", "")
        finish_on_host(work, 60.0)
    try:
        with ranks.joined(60.0):  # a second time
            if ranks.rank == 1:
                raise ValueError("the simulator broke")
            ranks.count(1)
    except (RankLost, ValueError) as error:
        found["lost"] = str(error)
    torch.save(found, folder / f"{ranks.rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes came to, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    in_two_ranks(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_hold_the_same_weights_bit_for_bit(
    found: list[dict[str, Any]], case: str
) -> None:
    for tree in ("model", "optimizer"):
        mine, theirs = (dict(leaves(result[case][tree])) for result in found)
        assert mine.keys() == theirs.keys()
        for path, value in mine.items():
            assert torch.equal(value, theirs[path]), path
    assert found[0][case]["counters"] == found[1][case]["counters"]


@pytest.mark.parametrize("case", ["ppo", "impala"])
def test_two_halves_give_the_weights_and_counts_of_one_batch_of_both(
    found: list[dict[str, Any]], case: str
) -> None:
    whole = outcome(learn(case, 2 * NUM_ENVS, joined))
    assert found[0][case]["counters"]["num_steps"] == whole["counters"]["num_steps"]
    assert found[0][case]["counters"]["nan_states"] == whole["counters"]["nan_states"] == 18
    torch.testing.assert_close(found[0][case], whole, rtol=1e-5, atol=1e-5, check_dtype=True)


def test_the_adaptive_step_size_follows_the_divergence_of_the_whole_batch(
    found: list[dict[str, Any]],
) -> None:
    start = CASES["ppo"][1].optimizer.lr
    rates = {result["ppo"]["counters"]["adaptive_lr"] for result in found}
    rates.add(outcome(learn("ppo", 2 * NUM_ENVS, joined))["counters"]["adaptive_lr"])
    assert len(rates) == 1
    assert rates != {start}


def test_statistics_are_those_of_all_rows(found: list[dict[str, Any]]) -> None:
    datas = [joined(update) for update in range(NUM_UPDATES)]
    rows = torch.cat([data["obs"][:LENGTH][data["mask"]] for data in datas]).double()
    model = found[1]["ppo"]["model"]
    names = {name.rpartition(".")[2]: name for name in model if "norm" in name}
    assert float(model[names["count"]]) == len(rows)
    torch.testing.assert_close(model[names["mean"]], rows.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model[names["var"]], rows.var(0, correction=0), rtol=1e-12, atol=0)


def test_sums_keep_each_dtype_and_lose_no_count(found: list[dict[str, Any]]) -> None:
    for result in found:
        large, ones = result["dtypes"]
        assert int(large) == 2 * (2**53 + 1)
        assert ones.tolist() == [2, 2]
        assert ones.dtype == torch.int32


def test_ranks_go_by_the_clock_that_ends_the_run(found: list[dict[str, Any]]) -> None:
    assert [result["left"] for result in found] == [0.9, 0.9]  # bit for bit: steps hang on it


def test_the_lowest_rank_that_has_a_word_is_heard_by_all(found: list[dict[str, Any]]) -> None:
    assert [result["words"] for result in found] == [[None, "late", "r0"]] * 2


def test_the_error_names_what_differs_between_ranks_at_the_start(
    found: list[dict[str, Any]],
) -> None:
    for result in found:
        assert "rank 1 of 2 differs from rank 0 in its weights" in result["unlike"]


def test_the_limit_on_lost_states_counts_those_of_all_ranks(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["limit"].startswith("19 environments")


def test_the_error_of_one_rank_ends_the_other_with_its_reason(found: list[dict[str, Any]]) -> None:
    assert found[1]["lost"] == "the simulator broke"
    assert found[0]["lost"].startswith("rank 1 of 2 failed: ValueError: the simulator broke")


def test_a_collective_is_waited_for_on_the_host_until_its_deadline(
    found: list[dict[str, Any]],
) -> None:
    assert found[0]["late"] == "no answer of all others within 0.3 s"


def test_without_torchrun_a_process_is_alone() -> None:
    assert Ranks.from_environment({"RANK": "1", "WORLD_SIZE": "2"}).world_size == 1
    ranks = Ranks.from_environment({})
    tensors = [torch.ones(2)]
    with ranks.joined(1.0):
        assert ranks.sum(tensors)[0] is tensors[0]
        assert ranks.reduce is None
        assert (ranks.count(3, 4), ranks.first_text("done")) == ([3, 4], "done")
        assert not torch.distributed.is_initialized()


def test_each_rank_computes_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = Ranks(rank=3, world_size=4, local_rank=1)
    assert [ranks.own_device(name) for name in ("cpu", "cuda", "cuda:1")] == [
        "cpu",
        "cuda:1",
        "cuda:1",
    ]
    with pytest.raises(UniRLError, match="given device cuda:0"):
        ranks.own_device("cuda:0")
    assert Ranks().own_device("cuda:0") == "cuda:0"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # Started with CUDA_VISIBLE_DEVICES of its own, as cluster managers do.
    assert ranks.own_device("cuda") == "cuda"
