"""Weights for tokens that an engine drew with other probabilities than the learner computes.

TIS: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025).
IcePop: arXiv 2510.18855. Decoupled PPO (the weight of pi_old over the behaviour): arXiv 2110.00641,
for language models arXiv 2505.24298. A token that is rejected weighs 0 and stays in the
denominator: otherwise rejecting would make the rest louder.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from unirl.vtrace.token_rows import check_tokens, per_completion

Correction: TypeAlias = Literal["none", "tis", "icepop"]
"""none: weights of 1. tis: the ratio within [low, high]. icepop: the ratio, and 0 outside."""
Level: TypeAlias = Literal["token", "sequence", "geometric"]
"""Whose ratio: the token's, the product over the completion's tokens, or their geometric mean."""
SequenceMask: TypeAlias = Literal["none", "geometric", "product"]
"""Which ratio of a completion decides whether it counts."""

MAX_LOG_WEIGHT = 20.0
"""A ratio counts as at most e^20 and at least e^-20, so that nothing overflows before a bound."""


def correction_weights(
    old_logp: Tensor,
    logp: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    correction: Correction = "tis",
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
    sequence_mask: SequenceMask = "none",
    mask_low: float = 0.0,
    mask_high: float = math.inf,
) -> Tensor:
    """What each token's loss is multiplied by, [N]; 0 where mask is 0. No gradient flows out.

    old_logp (the learner's, before the update), logp (the behaviour's), mask, sequence: [N]. A
    product over a completion of T tokens amounts to e^(T d) for a constant mismatch d: it is of no
    use for long ones. Raises ValueError when shapes disagree.
    """
    check_tokens(mask, sequence, num_sequences, old_logp=old_logp, logp=logp)
    with torch.no_grad():
        rows = mask != 0
        log_weight = torch.where(rows, old_logp - logp, 0.0)
        log_weight = log_weight.to(torch.promote_types(log_weight.dtype, torch.float32))
        if correction == "none":
            weight = torch.ones_like(log_weight)
        else:
            ratio = _ratio(log_weight, rows, sequence, num_sequences, level)
            if correction == "tis":
                weight = ratio.clamp(low, high)
            else:
                weight = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        if sequence_mask != "none":
            which: Level = "sequence" if sequence_mask == "product" else "geometric"
            ratio = _ratio(log_weight, rows, sequence, num_sequences, which)
            weight = torch.where((ratio >= mask_low) & (ratio <= mask_high), weight, 0.0)
        return torch.where(rows, weight, 0.0)


def _ratio(
    log_weight: Tensor, rows: Tensor, sequence: Tensor, num_sequences: int, level: Level
) -> Tensor:
    if level != "token":
        total = per_completion(log_weight, sequence, num_sequences)
        if level == "geometric":
            drawn = per_completion(rows.to(log_weight.dtype), sequence, num_sequences)
            total = total / drawn.clamp(min=1)
        log_weight = total[sequence]
    return log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
