"""Claims about group-relative advantages: against the slow twin, and where systems are special."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.vtrace.token_reference import slow_group_advantages
from unirl.vtrace import Baseline, Scale, Singleton, group_advantages, group_baseline

baselines: tuple[Baseline, ...] = get_args(Baseline)
scales: tuple[Scale, ...] = get_args(Scale)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of 1 to 6 in mixed order, with ids that are no indices, and some rewards missing."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (9,), generator=generator)
    ids = torch.tensor([7, -3, 2**40, 0, 5, 11, 12, 13, 99])
    group = ids.repeat_interleave(sizes)[torch.randperm(int(sizes.sum()), generator=generator)]
    reward = torch.randint(0, 4, (group.numel(),), generator=generator).double() / 3
    valid = torch.rand(group.numel(), generator=generator) > 0.15
    return reward.masked_fill(~valid, float("nan")), group, valid


@pytest.mark.parametrize("singleton", get_args(Singleton))
@pytest.mark.parametrize("scale", scales)
@pytest.mark.parametrize("baseline", baselines)
def test_advantages_equal_the_slow_twin(
    baseline: Baseline, scale: Scale, singleton: Singleton
) -> None:
    if baseline == "none" and scale not in ("none", "batch_std"):
        return  # refused by resolve(): equal rewards would be divided by epsilon alone
    for seed in range(4):
        reward, group, valid = batch(seed)
        found = group_advantages(
            reward, group, valid, baseline=baseline, scale=scale, singleton=singleton
        )
        want = slow_group_advantages(
            reward.nan_to_num().tolist(),
            group.tolist(),
            valid.tolist(),
            baseline=baseline,
            scale=scale,
            singleton=singleton,
        )
        # Equal rewards give exactly 0 here, while the twin's mean of thirds may be off by an ulp.
        assert torch.allclose(found, found.new_tensor(want), atol=1e-9, rtol=1e-9)


def test_a_completion_without_reward_changes_nobodys_advantage() -> None:
    reward = torch.tensor([1.0, 0.0, 0.0, float("nan")])
    group, valid = torch.zeros(4, dtype=torch.int64), torch.tensor([True, True, True, False])
    for baseline in baselines:
        for scale in scales:
            found = group_advantages(reward, group, valid, baseline=baseline, scale=scale)
            alone = group_advantages(
                reward[:3], group[:3], valid[:3], baseline=baseline, scale=scale
            )
            assert torch.equal(found[:3], alone)
            assert found[3] == 0


@pytest.mark.parametrize("scale", scales)
def test_equal_rewards_give_exactly_zero(scale: Scale) -> None:
    reward = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.7])
    group = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    found = group_advantages(reward, group, torch.ones(7), baseline="mean", scale=scale)
    assert torch.equal(found, torch.zeros(7))


@pytest.mark.parametrize(
    ("baseline", "singleton", "group"),
    [("none", "zero", [0, 0, 0, 1, 1, 1, 1]), ("mean", "keep", [0, 1, 2, 3, 4, 5, 6])],
)
def test_equal_rewards_are_not_divided_by_epsilon(
    baseline: Baseline, singleton: Singleton, group: list[int]
) -> None:
    """0.1 seven times has a deviation of 1e-17 about its mean, and a failed reward none."""
    reward, ids = torch.full((7,), 0.1, dtype=torch.float64), torch.tensor(group)
    valid = torch.tensor([True] * 6 + [False])
    found = group_advantages(
        reward, ids, valid, baseline=baseline, scale="batch_std", singleton=singleton
    )
    assert torch.equal(found, reward * valid)
    slow = slow_group_advantages(
        reward.tolist(),
        group,
        valid.tolist(),
        baseline=baseline,
        scale="batch_std",
        singleton=singleton,
    )
    assert found.tolist() == slow
    # Another process has six rewards of 1: then there is a deviation, however equal mine are.
    others = iter([[6.0, 6.0], [6 * 0.45**2]])
    apart = group_advantages(
        reward,
        ids,
        valid,
        baseline=baseline,
        scale="batch_std",
        singleton=singleton,
        reduce=lambda sums: [one + more for one, more in zip(sums, next(others), strict=True)],
    )
    assert torch.allclose(apart[:6], reward[:6] / (math.sqrt(12 * 0.45**2 / 11) + 1e-6))


def test_groups_with_the_same_rewards_but_other_ids_stay_apart() -> None:
    reward, valid = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.ones(4)
    assert not group_advantages(reward, torch.tensor([4, 4, 9, 9]), valid).any()
    assert group_advantages(reward, torch.tensor([4, 4, 4, 4]), valid).all()


def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_1() -> None:
    reward, group, valid = torch.tensor([0.3, 1.0, 0.2, 0.9]), torch.zeros(4).long(), torch.ones(4)
    mean = group_advantages(reward, group, valid, baseline="mean")
    assert torch.allclose(group_advantages(reward, group, valid), mean * 4 / 3)


def test_batch_deviation_is_that_of_all_processes() -> None:
    reward, group, valid = batch(0)
    whole = group_advantages(reward, group, valid, scale="batch_std")
    for part in (group <= 7, group > 7):  # whole groups on each of two processes
        mine = (reward[part], group[part], valid[part])
        rest = (reward[~part], group[~part], valid[~part])
        # What the other process would send: count and sum, then its squares about the mean.
        known = torch.where(valid, reward, 0.0).double()
        others = known[~part]
        mean = known.sum() / valid.sum()
        answers = iter(
            [
                [rest[2].double().sum(), others.sum()],
                [torch.where(rest[2], others - mean, 0.0).square().sum()],
            ]
        )
        found = group_advantages(
            *mine,
            scale="batch_std",
            reduce=lambda sums, more=answers: [
                a + b for a, b in zip(sums, next(more), strict=True)
            ],
        )
        assert torch.allclose(found, whole[part], atol=1e-12)


def test_the_group_baseline_leaves_the_completion_itself_out() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.5, 0.25]), torch.tensor([1, 1, 1, 2])
    others = group_baseline(reward, group, torch.ones(4), leave_one_out=True)
    assert torch.allclose(others, torch.tensor([0.25, 0.75, 0.5, 0.0]))
    mean = group_baseline(reward, group, torch.ones(4), leave_one_out=False)
    assert torch.allclose(mean, torch.tensor([0.5, 0.5, 0.5, 0.0]))


def test_shapes_and_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per completion"):
        group_advantages(torch.zeros(3), torch.zeros(3, 1).long(), torch.ones(3))
    with pytest.raises(ValueError, match="ids are integers"):
        group_advantages(torch.zeros(3), torch.zeros(3), torch.ones(3))
