"""What a policy gains per token: clipped ratios and their kin, as losses to be minimised.

PPO: arXiv 1707.06347, eq. 7; dual clip: arXiv 1912.09729. CISPO: arXiv 2506.13585, eq. 4. GSPO:
arXiv 2507.18071, its token variant. SAPO: arXiv 2511.20347. DPPO (total variation): arXiv
2602.04879.

With rho = exp(new_logp - old_logp), A the advantage, sg without gradient:

    reinforce   -A new_logp
    ppo         -min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 at most -dual_clip A
    cispo       -sg(clip(rho, 1 - low, 1 + high)) A new_logp
    gspo        ppo with sg(s) exp(new_logp - sg(new_logp)) for rho, s the geometric mean of rho
    sapo        -A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A
    dppo        -rho A, and 0 where the probability left old's by more than low or high in A's
                direction
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unirl.vtrace.token_rows import check_tokens, per_completion

ObjectiveName: TypeAlias = Literal["ppo", "cispo", "gspo", "sapo", "dppo", "reinforce"]


class TokenObjective(NamedTuple):
    """Per token, [N]: the loss, 0 where mask is 0, and where a bound took its gradient or part of
    it, because the ratio was low or high."""

    loss: Tensor
    low: Tensor
    high: Tensor


def token_objective(
    new_logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    objective: ObjectiveName = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    log_ratio_clamp: float = 20.0,
) -> TokenObjective:
    """The loss of each token as the module says, in float32 at least.

    new_logp, old_logp, advantage, mask, sequence: [N]. Bounds are distances from a ratio of 1 (of
    probability for dppo). dual_clip: 0 is off. log_ratio_clamp: a log-ratio counts as at most that,
    without gradient beyond; may be math.inf. No gradient flows into old_logp and advantage. What
    tokens with mask 0 hold is ignored, NaN included. Raises ValueError when shapes disagree.
    """
    check_tokens(
        mask, sequence, num_sequences, new_logp=new_logp, old_logp=old_logp, advantage=advantage
    )
    rows = mask != 0
    dtype = torch.promote_types(new_logp.dtype, torch.float32)
    # Both factors are filled: filling only their product lets a masked NaN into the gradient.
    new = torch.where(rows, new_logp, 0.0).to(dtype)
    old = torch.where(rows, old_logp.detach(), 0.0).to(dtype)
    gain = torch.where(rows, advantage.detach(), 0.0).to(dtype)
    if objective == "reinforce":
        none = torch.zeros_like(rows)
        return TokenObjective(-gain * new, none, none)
    log_ratio = new - old
    if objective == "gspo":
        log_ratio = _sequence_ratio(new, log_ratio, rows, sequence, num_sequences)
    if math.isfinite(log_ratio_clamp):
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    ratio = log_ratio.exp()
    if objective == "sapo":
        return _soft(ratio, gain, tau_positive, tau_negative)
    if objective == "dppo":
        return _near_in_probability(ratio, new, old, gain, clip_low, clip_high)
    low, high = ratio.detach() < 1 - clip_low, ratio.detach() > 1 + clip_high
    kept = ratio.clamp(1 - clip_low, 1 + clip_high)
    if objective == "cispo":
        return TokenObjective(-kept.detach() * gain * new, low & rows, high & rows)
    loss = -torch.minimum(ratio * gain, kept * gain)
    if dual_clip:
        loss = torch.where(gain < 0, torch.minimum(loss, -dual_clip * gain), loss)
        high_or_far = (high & (gain > 0)) | ((ratio.detach() > dual_clip) & (gain < 0))
        return TokenObjective(loss, low & (gain < 0), high_or_far)
    return TokenObjective(loss, low & (gain < 0), high & (gain > 0))


def _sequence_ratio(
    new: Tensor, log_ratio: Tensor, rows: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """log s of each token's completion, with the gradient of the token's own log-probability."""
    drawn = per_completion(rows.to(new.dtype), sequence, num_sequences)
    mean = per_completion(log_ratio.detach(), sequence, num_sequences) / drawn.clamp(min=1)
    return torch.where(rows, new - new.detach() + mean[sequence], 0.0)


def _soft(ratio: Tensor, gain: Tensor, tau_positive: float, tau_negative: float) -> TokenObjective:
    # Not torch.where of two numbers: that is float32, whatever the rest is.
    tau = torch.full_like(gain, tau_negative).masked_fill_(gain > 0, tau_positive)
    none = torch.zeros_like(gain, dtype=torch.bool)
    return TokenObjective(-gain * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), none, none)


def _near_in_probability(
    ratio: Tensor, new: Tensor, old: Tensor, gain: Tensor, clip_low: float, clip_high: float
) -> TokenObjective:
    moved = new.detach().exp() - old.exp()
    high, low = (gain > 0) & (moved > clip_high), (gain < 0) & (moved < -clip_low)
    return TokenObjective(torch.where(high | low, 0.0, -gain * ratio), low, high)
