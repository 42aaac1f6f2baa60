"""Group-relative advantages: completions of one prompt are each other's baseline.

GRPO: arXiv 2402.03300, eq. 3. RLOO: arXiv 2402.14740, eq. 8. Dr. GRPO (no scale): arXiv 2503.20783.
Which completions belong together is given by ids, never found out by comparing prompts.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from unirl.vtrace.advantages import Reduce, over_all

Baseline: TypeAlias = Literal["none", "mean", "leave_one_out"]
"""What is taken off a reward: nothing, the group's mean, or the mean of the others."""
Scale: TypeAlias = Literal["none", "std", "std_biased", "leave_one_out_std", "batch_std"]
"""What divides it then: nothing, the group's deviation over n - 1 or over n, that of the others
(and nothing where they all agree), or that of all rewards of the batch (likewise)."""
Singleton: TypeAlias = Literal["zero", "keep"]
"""Advantage of a completion that is alone in its group: 0, or the reward itself."""


def group_advantages(
    reward: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    baseline: Baseline = "leave_one_out",
    scale: Scale = "none",
    epsilon: float = 1e-6,
    singleton: Singleton = "zero",
    reduce: Reduce | None = None,
) -> Tensor:
    """(reward - baseline) / (scale + epsilon) within each group: [S], of the reward's dtype.

    reward: [S]; group: [S] integers, equal where completions belong together; valid: [S], 0 where
    there is no reward: such a completion enters no statistic and gets 0. A group whose
    rewards are all equal gets exactly 0 (unless there is no baseline), so that it can be left out.

    Computed in float64: with rewards such as 0.1, float32 would find a deviation in equal ones.
    reduce: where these groups are a part of the batch (for batch_std); None: they are all of it.
    Groups are whole here. Raises ValueError when shapes disagree or group holds no integers.
    """
    with torch.no_grad():
        present, rewards, index, count = _grouped(reward, group, valid)
        mean = _per_group(rewards, index)[index] / count.clamp(min=1)
        differs = _differs(rewards, present, index)
        centred = torch.where(present & differs, rewards - mean, 0.0)
        if baseline == "none":
            advantage = rewards
        elif baseline == "mean":
            advantage = centred
        else:
            advantage = centred * count / (count - 1).clamp(min=1)
        divisor = _divisor(scale, epsilon, rewards, present, centred, count, index, reduce)
        advantage = advantage / divisor
        if baseline != "none":
            alone = rewards / divisor if singleton == "keep" else torch.zeros_like(rewards)
            advantage = torch.where(count > 1, advantage, alone)
        return torch.where(present, advantage, 0.0).to(reward.dtype)


def group_baseline(reward: Tensor, group: Tensor, valid: Tensor, *, leave_one_out: bool) -> Tensor:
    """Mean reward of each completion's group, or of the others in it: [S].

    It stands for the value of the prompt where there is no critic. Shapes as `group_advantages`.
    Alone in its group a completion has the baseline 0.
    """
    with torch.no_grad():
        present, rewards, index, count = _grouped(reward, group, valid)
        total = _per_group(rewards, index)[index]
        if leave_one_out:
            mean = (total - rewards) / (count - present.double()).clamp(min=1)
        else:
            mean = total / count.clamp(min=1)
        return torch.where(count > 1, mean, 0.0).to(reward.dtype)


def _grouped(reward: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Who has a reward, rewards (0 without one), indices of groups, and members with a reward."""
    _check(reward, group, valid)
    present = valid != 0
    rewards = torch.where(present, reward, 0.0).double()
    index = torch.unique(group, return_inverse=True)[1]
    return present, rewards, index, _per_group(present.double(), index)[index]


def _divisor(
    scale: Scale,
    epsilon: float,
    rewards: Tensor,
    present: Tensor,
    centred: Tensor,
    count: Tensor,
    index: Tensor,
    reduce: Reduce | None,
) -> Tensor:
    one = torch.ones_like(rewards)
    if scale == "none":
        return one
    if scale == "batch_std":
        std = _batch_std(rewards, present, reduce)
        return torch.where(std > 0, std + epsilon, one)
    squares = _per_group(centred.square(), index)[index]
    if scale == "leave_one_out_std":
        # The others' mean is -centred / (n - 1) away from the group's.
        square = centred.square()
        variance = (squares - square - square / (count - 1).clamp(min=1)) / (count - 2).clamp(min=1)
        # What cancellation leaves of 0 is not a deviation.
        varied = (count > 2) & (variance > 1e-12 * squares)
        return torch.where(varied, variance.clamp(min=0).sqrt() + epsilon, one)
    freedom = count - 1 if scale == "std" else count
    std = (squares / freedom.clamp(min=1)).sqrt()
    return torch.where(count > 1, std, one) + epsilon


def _batch_std(rewards: Tensor, present: Tensor, reduce: Reduce | None) -> Tensor:
    """Unbiased deviation of all rewards, 0 of equal ones; two passes, for one would cancel."""
    count, total = over_all(reduce, present.double().sum(), rewards.sum())
    mean = total / count.clamp(min=1)
    centred = torch.where(present, rewards - mean, 0.0)
    (squares,) = over_all(reduce, centred.square().sum())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    # A mean of equal rewards is off by rounding, which is no deviation. Not by the largest and the
    # smallest reward: processes share sums alone.
    return torch.where(std > 1e-12 * mean.abs(), std, 0.0)


def _per_group(values: Tensor, index: Tensor) -> Tensor:
    """Sums of the values of each group; at most S groups, unused entries stay 0."""
    return torch.zeros_like(values).index_add_(0, index, values)


def _differs(rewards: Tensor, present: Tensor, index: Tensor) -> Tensor:
    """[S], True where the group has different rewards."""
    highest = torch.full_like(rewards, -torch.inf).scatter_reduce_(
        0, index, torch.where(present, rewards, -torch.inf), "amax"
    )
    lowest = torch.full_like(rewards, torch.inf).scatter_reduce_(
        0, index, torch.where(present, rewards, torch.inf), "amin"
    )
    return (highest > lowest)[index]


def _check(reward: Tensor, group: Tensor, valid: Tensor) -> None:
    for name, tensor in (("group", group), ("valid", valid)):
        if tensor.shape != reward.shape or reward.dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and reward {tuple(reward.shape)}: "
                "both must be [S]. Give one entry per completion."
            )
    if group.is_floating_point() or group.dtype == torch.bool:
        raise ValueError(
            f"group has dtype {group.dtype}, but ids are integers. "
            "Number the groups of the batch, for example by their tickets."
        )
