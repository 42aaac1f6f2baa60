"""Drawing one token per row: by inverse CDF from a uniform number of the row's seed and the token's
index alone (SplitMix64, Steele et al. 2014), so that a completion does not depend on what else is
generated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BLOCK = 256
"""Vocabularies above four of these are summed by blocks first: adding up 50 000 probabilities one
after the other takes longer than the softmax does.
"""


def seed_keys(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter seeds over all 64 bits, so that neighbours share no stretch of their sequences."""
    result: NDArray[np.uint64] = _mixed(seeds + _GOLDEN)
    return result


def uniforms(keys: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row: the index-th of the sequence that belongs to the key; [n]."""
    bits = _mixed(keys + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits: the largest times any sum is still smaller than that sum.
    result: NDArray[np.float64] = (bits >> np.uint64(12)) * 2.0**-52
    return result


def draw(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per row and the logarithm of the probability it was drawn with: [n], [n].

    logits [n, V]; uniform [n], float64; temperature, top_k, top_p [n], or None where 1, 0 and 1
    hold for all. Computes in float32, or float64 where the logits are. Temperature 0 takes the
    likeliest token: its probability is 1, so its logp is 0.
    """
    exact = logits if logits.dtype == torch.float64 else logits.float()
    if temperature is not None:
        greedy = temperature == 0
        if bool(greedy.all()):
            return exact.argmax(-1), exact.new_zeros(len(exact))
        exact = exact / temperature.to(exact.dtype).masked_fill(greedy, 1.0)[:, None]
    probability = exact.softmax(-1)
    if top_k is not None or top_p is not None:
        probability = _filtered(probability, top_k, top_p)
    token = _inverse_cdf(probability, uniform)
    logp = probability.gather(1, token[:, None])[:, 0].log()
    if temperature is not None:
        token = torch.where(greedy, exact.argmax(-1), token)
        logp = logp.masked_fill(greedy, 0.0)
    return token, logp


def _filtered(probability: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Without the unlikely tail, adding up to 1 again: top_k first, then top_p of what is left."""
    size = probability.shape[1]
    if top_k is not None and top_p is None and bool((top_k > 0).all()):
        ordered, token = probability.topk(min(int(top_k.max()), size), dim=-1)
    else:
        ordered, token = probability.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=probability.device)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, size)
        ordered = ordered.masked_fill(rank >= limit[:, None], 0.0)
        ordered = ordered / ordered.sum(-1, keepdim=True)
    if top_p is not None:
        # A token stays while those before it have less than top_p: the first always does.
        before = ordered.cumsum(-1) - ordered
        tail = (before >= top_p[:, None].to(before.dtype)) & (rank > 0)
        # Rounding must not cut the tail of rows that want everything.
        tail &= top_p[:, None] < 1
        ordered = ordered.masked_fill(tail, 0.0)
        ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probability).scatter_(1, token, ordered)


def _inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulated probability exceeds uniform times the total: [n], int64. Its
    probability is above 0.
    """
    rows, size = probability.shape
    if size <= 4 * _BLOCK:
        total = probability.double().cumsum(-1)
        return (total <= (uniform * total[:, -1])[:, None]).sum(-1)
    if size % _BLOCK:
        probability = torch.nn.functional.pad(probability, (0, -size % _BLOCK))
    blocks = probability.view(rows, -1, _BLOCK)
    mass = blocks.sum(-1).double()
    total = mass.cumsum(-1)
    target = uniform * total[:, -1]
    block = (total <= target[:, None]).sum(-1, keepdim=True)
    before = (total.gather(1, block) - mass.gather(1, block))[:, 0]
    index = block[:, :, None].expand(-1, 1, _BLOCK)
    inside = blocks.gather(1, index)[:, 0].double().cumsum(-1)
    # The block's mass was rounded in another order: what is left must be inside it all the same.
    left = (target - before).clamp(min=0.0).minimum(inside[:, -1] * (1 - 2.0**-52))
    return block[:, 0] * _BLOCK + (inside <= left[:, None]).sum(-1)


def _mixed(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))
