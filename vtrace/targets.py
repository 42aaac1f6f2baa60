"""Value targets and advantages of time-major unrolls: V-trace and generalised advantages.

V-trace: IMPALA, arXiv 1802.01561, eq. 1 as the recursion of its remark 1.
GAE: arXiv 1506.02438, eq. 16.

Notation: V_t is value[t], g_t is discount[t], rho_t and c_t are the clipped ratios of the new
policy to the behaviour policy (c_t includes lambda), and v_t is the target:

    delta_t = rho_t (r_t + g_t V_{t+1} - V_t)
    x_t     = delta_t + g_t c_t x_{t+1}
    v_t     = V_t + x_t
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """The values to learn, and what weights the policy gradient; both [T, B]."""

    target: Tensor
    advantage: Tensor


class GAE(NamedTuple):
    """The values to learn, and the lambda-weighted advantage; both [T, B]."""

    target: Tensor
    advantage: Tensor


def vtrace_targets(
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
    """Off-policy corrected value targets and advantages (IMPALA, eq. 1; arXiv 1802.01561).

    log_rho (new_logp - logp), discount, reward, mask: [T, B]; value: [T+1, B]; all float32 or all
    float64, mask of any dtype. discount is gamma, and 0 where the episode terminated.
    The policy gradient's advantage is rho_t (r_t + g_t v_{t+1} - V_t), where v_T is value[T]. With
    pg_rho_clip this rho_t alone is clipped by that instead, and targets stay what they are:
    min(pg_rho_clip, rho_t) (r_t + g_t v_{t+1} - V_t). It is clip_pg_rho_threshold of TorchBeast
    (arXiv 1910.03552, vtrace.py) and of rlax (vtrace_td_error_and_advantage).

    A row with mask 0 gets its own value as target and advantage 0, and no trace passes it: the row
    before bootstraps with that value. What a masked row holds in log_rho, discount and reward is
    ignored.

    rho_clip bounds the correction of one row and decides which policy's value is learned; c_clip
    bounds how far corrections travel back. Any may be math.inf. A ratio above the square root of
    the largest float counts as that root, so that no single ratio overflows.

    No gradient flows out. Raises ValueError when shapes, dtypes or devices disagree, or a setting
    is out of range.
    """
    _check(value, mask, log_rho=log_rho, discount=discount, reward=reward)
    _check_range("rho_clip", rho_clip, math.inf)
    _check_range("c_clip", c_clip, math.inf)
    if pg_rho_clip is not None:
        _check_range("pg_rho_clip", pg_rho_clip, math.inf)
    _check_range("lambda_", lambda_, 1.0)
    with torch.no_grad():
        ratio = bounded_ratio(log_rho)
        rho = ratio.clamp(max=rho_clip)
        pg_rho = rho if pg_rho_clip is None else ratio.clamp(max=pg_rho_clip)
        trace = ratio.clamp_(max=c_clip).mul_(discount)
        if lambda_ != 1.0:
            trace.mul_(lambda_)
        error = _td_error(discount, reward, value)
        advantage = error * pg_rho if pg_rho is not rho else error
        delta = error.mul_(rho)
        carry = pg_rho.mul_(discount)  # how much of x_{t+1} enters the advantage of row t
        if mask is not None:
            filler = mask == 0
            # Filled, not multiplied: a NaN in a masked row must not come through.
            for term in (trace, delta, carry, advantage):
                term.masked_fill_(filler, 0.0)
        correction = _accumulate(delta, trace)
        advantage[:-1].addcmul_(carry[:-1], correction[1:])
        return VTrace(correction.add_(value[:-1]), advantage)


def gae(
    discount: Tensor,
    reward: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    lambda_: float = 0.95,
) -> GAE:
    """Generalised advantages and their value targets, on-policy (arXiv 1506.02438, eq. 16).

    discount, reward, mask: [T, B]; value: [T+1, B]; all float32 or all float64, mask of any dtype.
    discount is gamma, and 0 where the episode terminated. target is advantage + V.

    A row with mask 0 gets its own value as target and advantage 0, and no trace passes it. What it
    holds in discount and reward is ignored. No gradient flows out. Raises ValueError as
    `vtrace_targets` does.
    """
    _check(value, mask, discount=discount, reward=reward)
    _check_range("lambda_", lambda_, 1.0)
    with torch.no_grad():
        delta = _td_error(discount, reward, value)
        trace = discount * lambda_
        if mask is not None:
            filler = mask == 0
            for term in (trace, delta):
                term.masked_fill_(filler, 0.0)
        advantage = _accumulate(delta, trace)
        return GAE(advantage + value[:-1], advantage)


def bounded_ratio(log_rho: Tensor) -> Tensor:
    """exp(log_rho) as fresh memory, at most the square root of the largest float."""
    # Clamp first: a clip after exp would be too late for the overflow, and inf * 0 is NaN.
    return log_rho.clamp(max=0.5 * math.log(torch.finfo(log_rho.dtype).max)).exp_()


def _td_error(discount: Tensor, reward: Tensor, value: Tensor) -> Tensor:
    """r_t + g_t V_{t+1} - V_t as fresh memory, [T, B]."""
    return torch.addcmul(reward, discount, value[1:]).sub_(value[:-1])


def _accumulate(delta: Tensor, trace: Tensor) -> Tensor:
    """x_t = delta_t + trace_t x_{t+1} with x_T = 0, as fresh memory, [T, B].

    One operation per row. Out of place on purpose: writing the rows in place saves a tenth in eager
    mode, but torch.compile turns each write into a copy of all rows, which is quadratic in T.
    """
    deltas, traces = delta.unbind(0), trace.unbind(0)
    rows = [deltas[-1]]
    for t in range(len(deltas) - 2, -1, -1):
        rows.append(torch.addcmul(deltas[t], traces[t], rows[-1]))
    return torch.stack(rows[::-1])


def _check(value: Tensor, mask: Tensor | None, **inputs: Tensor) -> None:
    """Raise ValueError unless value is [T+1, B] and everything else agrees with it."""
    shape = inputs["reward"].shape
    if len(shape) != 2 or shape[0] == 0:
        raise ValueError(
            f"reward has shape {tuple(shape)}, but [T, B] with T >= 1 is needed. "
            "Put time first, and flatten or add the batch axis."
        )
    if value.shape != (shape[0] + 1, shape[1]):
        raise ValueError(
            f"value has shape {tuple(value.shape)} and reward {tuple(shape)}: value must be "
            f"[T+1, B] = {(shape[0] + 1, shape[1])}. "
            "Append the value of the observation after the last step."
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"value has dtype {value.dtype}, but targets need float32 or float64. "
            "Convert with .float()."
        )
    for name, tensor in inputs.items():
        if tensor.dtype != value.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and value {value.dtype}: they must be equal. "
                f"Convert with .to({value.dtype})."
            )
    if mask is not None:
        inputs["mask"] = mask
    for name, tensor in inputs.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and reward {tuple(shape)}: "
                "both must be [T, B]. Drop the bootstrap row or expand to the batch."
            )
        if tensor.device != value.device:
            raise ValueError(
                f"{name} is on {tensor.device} and value on {value.device}: "
                "they must be on one device. Move one with .to()."
            )


def _check_range(name: str, setting: float, high: float) -> None:
    if not 0.0 <= setting <= high:
        raise ValueError(
            f"{name} is {setting}, but 0 <= {name} <= {high} must hold. "
            "Choose it within these bounds."
        )
