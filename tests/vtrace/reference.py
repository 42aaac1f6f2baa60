"""Slow twins of targets.py, advantages.py and the clipped losses, for their tests: the papers' sums
as plain loops, one row at a time.

V-trace: arXiv 1802.01561, eq. 1. GAE: arXiv 1506.02438, eq. 16. PPO: arXiv 1707.06347, eq. 7.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.vtrace.targets import GAE, VTrace


def slow_vtrace_targets(
    log_rho: Tensor,
    discount: Tensor,
    reward: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    pg_rho_clip: float | None = None,
    lambda_: float = 1.0,
) -> VTrace:
    """v_s = V(x_s) + sum_t gamma^(t-s) (prod_{s<=i<t} c_i) delta_t V; as `vtrace_targets`."""
    num_rows, num_envs = reward.shape
    ratios = [[_exp(x) for x in row] for row in log_rho.tolist()]
    discounts, rewards, values = discount.tolist(), reward.tolist(), value.tolist()
    masks = torch.ones_like(reward).tolist() if mask is None else mask.tolist()
    targets = [row[:] for row in values]  # v_T = V(x_T), and so for masked rows
    advantages = [[0.0] * num_envs for _ in range(num_rows)]
    for b in range(num_envs):
        for s in range(num_rows):
            for t in range(s, num_rows):
                if not masks[t][b]:
                    break
                rho = min(rho_clip, ratios[t][b])
                delta = rho * (rewards[t][b] + discounts[t][b] * values[t + 1][b] - values[t][b])
                weight = 1.0
                for i in range(s, t):
                    weight *= discounts[i][b] * lambda_ * min(c_clip, ratios[i][b])
                targets[s][b] += weight * delta
        for s in range(num_rows):
            if masks[s][b]:
                rho = min(rho_clip if pg_rho_clip is None else pg_rho_clip, ratios[s][b])
                advantages[s][b] = rho * (
                    rewards[s][b] + discounts[s][b] * targets[s + 1][b] - values[s][b]
                )
    return VTrace(_as(targets[:-1], reward), _as(advantages, reward))


def slow_gae(
    discount: Tensor,
    reward: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    lambda_: float = 0.95,
) -> GAE:
    """A_s = sum_l (gamma lambda)^l delta_{s+l}; as `gae`."""
    num_rows, num_envs = reward.shape
    discounts, rewards, values = discount.tolist(), reward.tolist(), value.tolist()
    masks = torch.ones_like(reward).tolist() if mask is None else mask.tolist()
    advantages = [[0.0] * num_envs for _ in range(num_rows)]
    for b in range(num_envs):
        for s in range(num_rows):
            for t in range(s, num_rows):
                if not masks[t][b]:
                    break
                weight = 1.0
                for i in range(s, t):
                    weight *= discounts[i][b] * lambda_
                advantages[s][b] += weight * (
                    rewards[t][b] + discounts[t][b] * values[t + 1][b] - values[t][b]
                )
    targets = [
        [a + v for a, v in zip(*rows, strict=True)]
        for rows in zip(advantages, values[:-1], strict=True)
    ]
    return GAE(_as(targets, reward), _as(advantages, reward))


def slow_vtrace_gae(
    log_rho: Tensor,
    discount: Tensor,
    reward: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    pg_rho_clip: float | None = None,
    lambda_: float = 0.95,
) -> VTrace:
    """A_s = rho_s (delta_s + sum_{t>s} (gamma lambda)^(t-s) (prod_{s<i<t} c_i) rho_t delta_t).

    delta is without its ratio here. As `vtrace_gae`.
    """
    num_rows, num_envs = reward.shape
    ratios = [[_exp(x) for x in row] for row in log_rho.tolist()]
    discounts, rewards, values = discount.tolist(), reward.tolist(), value.tolist()
    masks = torch.ones_like(reward).tolist() if mask is None else mask.tolist()
    advantages = [[0.0] * num_envs for _ in range(num_rows)]
    for b in range(num_envs):
        for s in range(num_rows):
            total = 0.0
            for t in range(s, num_rows):
                if not masks[t][b]:
                    break
                weight = 1.0
                for i in range(s, t):
                    weight *= discounts[i][b] * lambda_
                    weight *= min(c_clip, ratios[i][b]) if i > s else 1.0
                if t > s:
                    weight *= min(rho_clip, ratios[t][b])
                total += weight * (
                    rewards[t][b] + discounts[t][b] * values[t + 1][b] - values[t][b]
                )
            if masks[s][b]:
                pg_clip = rho_clip if pg_rho_clip is None else pg_rho_clip
                advantages[s][b] = min(pg_clip, ratios[s][b]) * total
    target = slow_vtrace_targets(
        log_rho,
        discount,
        reward,
        value,
        mask=mask,
        rho_clip=rho_clip,
        c_clip=c_clip,
        lambda_=lambda_,
    ).target
    return VTrace(target, _as(advantages, reward))


def slow_clipped_policy_loss(
    new_logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip: float
) -> tuple[float, int]:
    """Sum and number of rows; as `clipped_policy_loss`."""
    total, count = 0.0, 0
    for new, old, gain, kept in _rows(new_logp, old_logp, advantage, mask):
        if kept:
            ratio = _exp(new - old)
            total -= min(ratio * gain, min(max(ratio, 1 - clip), 1 + clip) * gain)
            count += 1
    return total, count


def slow_clipped_value_loss(
    value: Tensor, old_value: Tensor, target: Tensor, mask: Tensor, *, clip: float
) -> tuple[float, int]:
    """Sum and number of rows; as `clipped_value_loss`."""
    total, count = 0.0, 0
    for new, old, wanted, kept in _rows(value, old_value, target, mask):
        if kept:
            near = min(max(new, old - clip), old + clip)
            total += 0.5 * max((new - wanted) ** 2, (near - wanted) ** 2)
            count += 1
    return total, count


def _rows(*tensors: Tensor) -> zip[tuple[float, ...]]:
    """The numbers of tensors of one shape, element by element."""
    return zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True)


def _exp(x: float) -> float:
    """exp without Python's OverflowError."""
    return math.exp(x) if x < 700.0 else math.inf


def _as(rows: list[list[float]], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=like.dtype, device=like.device)
