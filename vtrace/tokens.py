"""Losses of packed tokens: their sum over a micro-batch, and what the whole batch divides it by.

Token mean: DAPO, arXiv 2503.14476. Mean of means: GRPO, arXiv 2402.03300. Constant: Dr. GRPO, arXiv
2503.20783. A denominator counts tokens or completions of the whole batch; it is added up over
micro-batches and processes before the first backward(), so that no split of the batch changes the
gradient. Completions are never split.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from unirl.vtrace.losses import Loss
from unirl.vtrace.token_rows import check_tokens, per_completion

Aggregation: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
"""token-mean: every token counts the same. seq-mean-token-mean: every completion does, so tokens of
long ones count less. seq-mean-token-sum: the sum over tokens, per completion. -norm: that, divided
by a constant number of tokens."""


def aggregate(
    loss: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    aggregation: Aggregation = "token-mean",
    norm_tokens: float = 1.0,
) -> Loss:
    """Per-token losses [N] as numerator and denominator of this micro-batch.

    mask, sequence: [N], sequence counting 0..num_sequences-1. norm_tokens: the constant of
    seq-mean-token-sum-norm. A completion without tokens counts nowhere. What tokens with mask 0
    hold is ignored. Raises ValueError when shapes disagree.
    """
    check_tokens(mask, sequence, num_sequences, loss=loss)
    rows = mask != 0
    kept = torch.where(rows, loss, 0.0)
    dtype = torch.promote_types(loss.dtype, torch.float32)
    if aggregation == "seq-mean-token-mean":
        drawn = per_completion(rows.to(dtype), sequence, num_sequences)
        kept = kept / drawn.clamp(min=1)[sequence]
    elif aggregation == "seq-mean-token-sum-norm":
        kept = kept / norm_tokens
    below = aggregate_denominator(mask, sequence, num_sequences, aggregation=aggregation)
    return Loss(kept.sum(dtype=dtype), below.to(dtype))


def aggregate_denominator(
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    aggregation: Aggregation = "token-mean",
) -> Tensor:
    """What `aggregate` divides by, of this micro-batch: a float64 scalar to be added up."""
    check_tokens(mask, sequence, num_sequences)
    rows = (mask != 0).double()
    if aggregation == "token-mean":
        return rows.sum()
    return (per_completion(rows, sequence, num_sequences) > 0).double().sum()
