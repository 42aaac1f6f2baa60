"""What an update did to the probabilities of its tokens, as sums over micro-batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unirl.vtrace.token_rows import check_tokens

_SUMS = (
    "tokens",
    "clipped_low",
    "clipped_high",
    "log_ratio",
    "kl",
    "weight",
    "weight_squared",
    "mismatch",
    "mismatch_kl",
)
_NUM_BINS = 240
_FROM, _TO = -8.0, 2.0
"""Powers of ten between which the histogram of the mismatch tells values apart."""


class TokenMetrics(NamedTuple):
    """Sums over a micro-batch: add those of a batch with +; over processes, sum `sums` and
    `histogram` and take the maximum of `maxima`.
    """

    sums: Tensor
    maxima: Tensor
    """Largest weight, smallest weight times -1, largest mismatch."""
    histogram: Tensor
    """How many tokens have a mismatch of which size."""

    def __add__(self, other: TokenMetrics) -> TokenMetrics:  # type: ignore[override]
        return TokenMetrics(
            self.sums + other.sums,
            torch.maximum(self.maxima, other.maxima),
            self.histogram + other.histogram,
        )

    @property
    def num_tokens(self) -> float:
        return float(self.sums[_SUMS.index("tokens")])

    @property
    def approx_kl(self) -> Tensor:
        """Mean of losses/approx_kl over the tokens; 0 of none."""
        return self.sums[_SUMS.index("kl")] / max(1.0, self.num_tokens)

    def values(self) -> dict[str, float]:
        """Numbers by the names that TRL gives them, and ours where it has none; {} of no tokens."""
        sums = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        num = sums["tokens"]
        if not num:
            return {}
        largest, smallest, mismatch = self.maxima.tolist()
        squared = sums["weight_squared"]
        return {
            "clip_ratio/low_mean": sums["clipped_low"] / num,
            "clip_ratio/high_mean": sums["clipped_high"] / num,
            "losses/log_ratio": sums["log_ratio"] / num,
            "losses/approx_kl": sums["kl"] / num,
            "sampling/importance_sampling_ratio/min": -smallest,
            "sampling/importance_sampling_ratio/mean": sums["weight"] / num,
            "sampling/importance_sampling_ratio/max": largest,
            "sampling/effective_sample_size": sums["weight"] ** 2 / (num * squared or 1.0),
            "sampling/sampling_logp_difference/mean": sums["mismatch"] / num,
            "sampling/sampling_logp_difference/p99": min(self._quantile(0.99), mismatch),
            "sampling/sampling_logp_difference/max": mismatch,
            "sampling/kl": sums["mismatch_kl"] / num,
        }

    def _quantile(self, level: float) -> float:
        """Upper edge of its bin: at most a tenth too large."""
        reached = self.histogram.cumsum(0) >= level * self.histogram.sum()
        index = int(reached.int().argmax())
        return float(10.0 ** (_FROM + (_TO - _FROM) * (index + 1) / _NUM_BINS))


def token_metrics(
    new_logp: Tensor,
    old_logp: Tensor,
    logp: Tensor,
    weight: Tensor,
    low: Tensor,
    high: Tensor,
    mask: Tensor,
    sequence: Tensor,
) -> TokenMetrics:
    """Metrics of packed tokens, all [N]. No gradient flows.

    new_logp against old_logp is what the update did (log_ratio, approx_kl: k3 of old to new);
    old_logp against logp (the engine's) is the mismatch, an absolute difference, and its KL. weight
    is what the correction multiplied each token by; low and high where a clip took hold.
    effective_sample_size is (sum w)^2 / (n sum w^2), 1 for equal weights.
    """
    check_tokens(mask, sequence, 0, new_logp=new_logp, old_logp=old_logp, logp=logp, weight=weight)
    with torch.no_grad():
        rows = mask != 0
        new, old, drawn = (value[rows].double() for value in (new_logp, old_logp, logp))
        weights = weight[rows].double()
        moved, apart = (new - old).clamp(-20, 20), (old - drawn).clamp(-20, 20)
        mismatch = apart.abs()
        ones = torch.ones_like(new)
        columns = (
            ones,
            (low[rows] != 0).double(),
            (high[rows] != 0).double(),
            moved,
            moved.expm1() - moved,
            weights,
            weights.square(),
            mismatch,
            apart.expm1() - apart,
        )
        sums = torch.stack([column.sum() for column in columns])
        extremes = (weights, -weights, mismatch)
        maxima = torch.stack([x.max() if x.numel() else x.new_tensor(-math.inf) for x in extremes])
        position = (mismatch.clamp(min=1e-30).log10() - _FROM) / (_TO - _FROM) * _NUM_BINS
        bins = position.long().clamp(0, _NUM_BINS - 1)
        return TokenMetrics(sums, maxima, torch.bincount(bins, minlength=_NUM_BINS).double())
