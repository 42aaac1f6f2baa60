"""Slow twins of groups.py and of the token_*.py, for their tests: the formulas as plain loops over
numbers, one completion and one token at a time. Sources as in the modules they mirror.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unirl.vtrace.groups import Baseline, Scale, Singleton
from unirl.vtrace.token_corrections import Correction, Level
from unirl.vtrace.token_objectives import ObjectiveName
from unirl.vtrace.tokens import Aggregation

Numbers = Sequence[float]


class SlowLoss(NamedTuple):
    """Loss per token, and its derivative by the token's new_logp."""

    loss: list[float]
    gradient: list[float]


def slow_group_advantages(
    reward: Numbers,
    group: Sequence[int],
    valid: Sequence[bool],
    *,
    baseline: Baseline = "leave_one_out",
    scale: Scale = "none",
    epsilon: float = 1e-6,
    singleton: Singleton = "zero",
) -> list[float]:
    """As `group_advantages`."""
    found = []
    for i, r in enumerate(reward):
        mates = [j for j in range(len(reward)) if group[j] == group[i] and valid[j]]
        others = [reward[j] for j in mates if j != i]
        rewards = [reward[j] for j in mates]
        if not valid[i]:
            found.append(0.0)
            continue
        if len(mates) == 1 and baseline != "none":
            top = r if singleton == "keep" else 0.0
        elif baseline == "none":
            top = r
        else:
            from_whom = rewards if baseline == "mean" else others
            top = r - sum(from_whom) / len(from_whom)
        if scale == "none":
            divisor = 1.0
        elif scale == "batch_std":
            known = [x for x, v in zip(reward, valid, strict=True) if v]
            divisor = _std(known, 1) + epsilon if max(known) > min(known) else 1.0
        elif scale == "leave_one_out_std":
            std = _std(others, 1)
            divisor = std + epsilon if std > 1e-9 else 1.0
        elif len(mates) == 1:
            divisor = 1.0 + epsilon
        else:
            divisor = _std(rewards, 1 if scale == "std" else 0) + epsilon
        found.append(top / divisor)
    return found


def _std(values: Numbers, less: int) -> float:
    if len(values) <= less:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - less))


def slow_token_gae(
    reward: Numbers,
    value: Numbers,
    mask: Numbers,
    sequence: Sequence[int],
    *,
    discount: float = 1.0,
    lambda_: float = 1.0,
    bootstrap: Numbers | None = None,
) -> list[float]:
    """Advantages of `token_gae`: backwards over each completion, skipping what has mask 0."""
    advantage = [0.0] * len(reward)
    for s in sorted(set(sequence)):
        next_value = bootstrap[s] if bootstrap is not None else 0.0
        last = 0.0
        for t in reversed([t for t, owner in enumerate(sequence) if owner == s and mask[t]]):
            delta = reward[t] + discount * next_value - value[t]
            last = delta + discount * lambda_ * last
            advantage[t] = last
            next_value = value[t]
    return advantage


def slow_correction_weights(
    old_logp: Numbers,
    logp: Numbers,
    mask: Numbers,
    sequence: Sequence[int],
    *,
    correction: Correction = "tis",
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> list[float]:
    """As `correction_weights` without sequence masks."""
    found = []
    for t, owner in enumerate(sequence):
        mine = [u for u, other in enumerate(sequence) if other == owner and mask[u]]
        if not mask[t]:
            found.append(0.0)
            continue
        if level == "token":
            ratio = math.exp(old_logp[t] - logp[t])
        else:
            ratio = math.prod(math.exp(old_logp[u] - logp[u]) for u in mine)
            if level == "geometric":
                ratio = ratio ** (1 / len(mine))
        if correction == "tis":
            found.append(min(max(ratio, low), high))
        elif correction == "icepop":
            found.append(ratio if low <= ratio <= high else 0.0)
        else:
            found.append(1.0)
    return found


def slow_objective(
    new_logp: Numbers,
    old_logp: Numbers,
    advantage: Numbers,
    mask: Numbers,
    sequence: Sequence[int],
    *,
    objective: ObjectiveName = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> SlowLoss:
    """As `token_objective`; the gradient is written down by hand."""
    losses, gradients = [], []
    for t, owner in enumerate(sequence):
        gain = advantage[t]
        if not mask[t]:
            losses.append(0.0)
            gradients.append(0.0)
            continue
        ratio = math.exp(new_logp[t] - old_logp[t])
        if objective == "gspo":
            mine = [u for u, other in enumerate(sequence) if other == owner and mask[u]]
            ratio = math.exp(sum(new_logp[u] - old_logp[u] for u in mine) / len(mine))
        kept = min(max(ratio, 1 - clip_low), 1 + clip_high)
        if objective == "reinforce":
            loss, slope = -gain * new_logp[t], -gain
        elif objective == "cispo":
            loss, slope = -kept * gain * new_logp[t], -kept * gain
        elif objective == "sapo":
            tau = tau_positive if gain > 0 else tau_negative
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            loss, slope = -gain * 4 / tau * gate, -gain * 4 * gate * (1 - gate) * ratio
        elif objective == "dppo":
            moved = math.exp(new_logp[t]) - math.exp(old_logp[t])
            out = moved > clip_high if gain > 0 else moved < -clip_low
            loss = slope = 0.0 if out else -gain * ratio
        else:
            loss = max(-gain * ratio, -gain * kept)
            slope = -gain * ratio if loss == -gain * ratio else 0.0
            if objective == "ppo" and dual_clip and gain < 0 and loss > -dual_clip * gain:
                loss, slope = -dual_clip * gain, 0.0
        losses.append(loss)
        gradients.append(slope)
    return SlowLoss(losses, gradients)


def slow_aggregate(
    loss: Numbers,
    mask: Numbers,
    sequence: Sequence[int],
    *,
    aggregation: Aggregation = "token-mean",
    norm_tokens: float = 1.0,
) -> float:
    """The mean that `aggregate` stands for."""
    rows: dict[int, list[float]] = {}
    for t, owner in enumerate(sequence):
        if mask[t]:
            rows.setdefault(owner, []).append(loss[t])
    if not rows:
        return 0.0
    if aggregation == "token-mean":
        return sum(map(sum, rows.values())) / sum(map(len, rows.values()))
    if aggregation == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows.values()) / len(rows)
    total = sum(map(sum, rows.values())) / len(rows)
    return total / norm_tokens if aggregation == "seq-mean-token-sum-norm" else total
