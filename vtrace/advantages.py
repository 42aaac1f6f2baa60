"""Advantages for clipped objectives: GAE corrected for the lag of the samples, and its whitening.

V-trace: arXiv 1802.01561, section 4.1. GAE: arXiv 1506.02438, eq. 16. The weight in front of a
clipped objective: arXiv 2110.00641 (decoupled objectives). Notation as in targets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from unirl.vtrace.targets import VTrace, bounded_ratio, vtrace_targets

Reduce: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Sums each tensor over all processes that hold a part of one batch."""


def vtrace_gae(
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
    """V-trace targets, and advantages that are GAE(lambda) where the sample is on-policy.

    Shapes, masks, clips and errors as `vtrace_targets`; so is the target v. Its advantage looks one
    step ahead and trusts v there; this one trusts it by lambda, as GAE does:

        A_t = rho_t (r_t + g_t ((1 - lambda) V_{t+1} + lambda v_{t+1}) - V_t)

    where pg_rho_clip, if given, clips this rho_t alone. With ratios of 1, v_{t+1} - V_{t+1} is GAE
    of the next row, so A_t is delta_t + g_t lambda A_{t+1}. At lambda 1 it is V-trace's own
    advantage. No gradient flows out.
    """
    target = vtrace_targets(
        log_rho,
        discount,
        reward,
        value,
        mask=mask,
        rho_clip=rho_clip,
        c_clip=c_clip,
        lambda_=lambda_,
    ).target
    with torch.no_grad():
        ahead = value[1:].clone()
        ahead[:-1].lerp_(target[1:], lambda_)
        advantage = torch.addcmul(reward, discount, ahead).sub_(value[:-1])
        pg_rho_clip = rho_clip if pg_rho_clip is None else pg_rho_clip
        advantage.mul_(bounded_ratio(log_rho).clamp_(max=pg_rho_clip))
        if mask is not None:
            advantage.masked_fill_(mask == 0, 0.0)
        return VTrace(target, advantage)


def whiten(
    advantage: Tensor,
    log_rho: Tensor,
    mask: Tensor,
    *,
    rho_clip: float = 1.0,
    reduce: Reduce | None = None,
) -> Tensor:
    """Advantages rho * A with A centred and the product scaled to unit size over the rows of mask.

    All [T, B], with 0 in the advantage's masked rows. On-policy this is (A - mean) / std. A is
    centred before its weight: a row that the policy has left (rho near 0) must keep no advantage,
    while a shift of the product would give it one and push the policy further away. No gradient
    flows out. reduce: where these rows are a part of the batch; None: they are all of it.
    """
    with torch.no_grad():
        rows = mask != 0
        rho = torch.where(rows, bounded_ratio(log_rho).clamp_(max=rho_clip), 0.0)
        total, weight = over_all(reduce, advantage.sum(), rho.sum())
        centred = advantage - rho * (total / weight.clamp(min=1e-8))
        squares, num_rows = over_all(reduce, centred.square().sum(), rows.sum())
        size = (squares / num_rows.clamp(min=1)).sqrt()
        return centred / size.clamp(min=1e-8)


def over_all(reduce: Reduce | None, *sums: Tensor) -> Sequence[Tensor]:
    """Scalars over all processes of the batch, in their dtypes; float32 would miscount rows."""
    if reduce is None:
        return sums
    totals = reduce([value.double() for value in sums])
    return [total.to(value.dtype) for total, value in zip(totals, sums, strict=True)]
