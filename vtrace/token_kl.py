"""Estimates of KL(policy || reference) per token, and which gradient they have.

Schulman 2020, "Approximating KL divergence". Their values are sound; their gradients need care
(arXiv 2506.09477): of tokens that the policy drew, k1's gradient is 0 in expectation, k3's is that
of the other KL (reference to policy), and k2's is right.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from unirl.vtrace.token_rows import check_tokens

KlEstimate: TypeAlias = Literal["k1", "k2", "k3"]
"""With d = log policy - log reference: d, d^2 / 2, or e^-d - 1 + d."""
KlGradient: TypeAlias = Literal["direct", "k2", "score", "ratio", "old_ratio"]
"""direct: that of the estimate as written. k2: the value as said, the gradient of k2. score: also
through the probability of having drawn the token, right on-policy. ratio: that, times the policy's
ratio to the engine that drew it, right off-policy too as long as the ratio is below its bound.
old_ratio: the estimate times the ratio to the policy before the update, gradient through both and
no bound (DeepSeek-V3.2, arXiv 2512.02556; TRL's use_bias_correction_kl): score at the first step
on a batch."""

MAX_RATIO = 5.0
"""Bound of the ratio of gradient ratio: without one, few old tokens would outweigh all others."""
MAX_LOG_RATIO = 20.0
"""|d| counts as at most 20 where the estimate is clamped too, else as at most 80, for e^89
overflows."""


def token_kl(
    new_logp: Tensor,
    reference: Tensor,
    mask: Tensor,
    sequence: Tensor,
    *,
    estimate: KlEstimate = "k3",
    gradient: KlGradient = "direct",
    logp: Tensor | None = None,
    old_logp: Tensor | None = None,
    clamp: float = 10.0,
) -> Tensor:
    """The estimate of each token, [N]; 0 where mask is 0.

    new_logp, reference, mask, sequence, logp (of the engine that drew, for gradient ratio) and
    old_logp (before the update, for old_ratio; None: new_logp): [N]. clamp: an estimate beyond
    +-clamp counts as that, and has no gradient. No gradient flows into any but new_logp.
    Raises ValueError when shapes disagree or logp is missing.
    """
    check_tokens(mask, sequence, 0, new_logp=new_logp, reference=reference)
    rows = mask != 0
    limit = MAX_LOG_RATIO if math.isfinite(clamp) else 80.0
    difference = torch.where(rows, new_logp - reference.detach(), 0.0).clamp(-limit, limit)
    if estimate == "k1":
        value = difference
    elif estimate == "k2":
        value = 0.5 * difference.square()
    else:
        value = (-difference).expm1() + difference
    if gradient in ("score", "ratio"):
        drawn = torch.where(rows, new_logp, 0.0)
        value = (drawn - drawn.detach()).exp() * value
    if gradient == "ratio":
        if logp is None:
            raise ValueError(
                "logp is missing, but gradient ratio needs it. Give it, or choose score."
            )
        apart = torch.where(rows, new_logp - logp, 0.0).detach()
        # Clamped before exp, and without gradient: beyond its bound a token still counts.
        value = apart.clamp(max=math.log(MAX_RATIO)).exp() * value
    if gradient == "old_ratio":
        before = (new_logp if old_logp is None else old_logp).detach()
        value = torch.where(rows, new_logp - before, 0.0).clamp(-limit, limit).exp() * value
    value = value.clamp(-clamp, clamp)
    if gradient == "k2":
        right = 0.5 * difference.square()
        value = right - right.detach() + value.detach()
    return value
