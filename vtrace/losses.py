"""Losses that carry numerator and denominator, so that micro-batches add up to the whole batch.

The actor-critic losses of IMPALA, arXiv 1802.01561, section 4.2, and the clipped ones of PPO, arXiv
1707.06347. All are to be minimised, and raise ValueError when shapes disagree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""A ratio of the new policy to the old counts as at most e^20, and has no gradient beyond: exp
would overflow, and one such row make everything NaN."""


class Loss(NamedTuple):
    """A sum over the rows that count, and how many they are; both scalars.

    A batch in micro-batches: count the rows of the whole batch first, then call backward() on each
    numerator divided by that count. The mean of means is another number when masks differ.
    """

    numerator: Tensor
    denominator: Tensor

    def mean(self) -> Tensor:
        """The loss per row that counts; 0 (with gradient 0) when none does."""
        return self.numerator / torch.where(self.denominator == 0, 1.0, self.denominator)

    def __add__(self, other: Loss) -> Loss:  # type: ignore[override]
        """The same loss over the rows of both; not for adding different losses of the same rows."""
        return Loss(self.numerator + other.numerator, self.denominator + other.denominator)


def policy_gradient_loss(new_logp: Tensor, advantage: Tensor, mask: Tensor) -> Loss:
    """-new_logp * advantage over the rows of mask; all of one shape."""
    _check(mask, new_logp=new_logp, advantage=advantage)
    rows = mask != 0
    # Both factors are filled: filling only their product lets a masked NaN into the gradient.
    weight = torch.where(rows, advantage.detach(), 0.0)
    return _total(-torch.where(rows, new_logp, 0.0) * weight, rows)


def clipped_policy_loss(
    new_logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip: float
) -> Loss:
    """-min(r A, clamp(r, 1 - clip, 1 + clip) A) with r = exp(new_logp - old_logp), over the rows of
    mask; all of one shape (PPO, eq. 7; arXiv 1707.06347).

    A row whose ratio has left the range in the direction of its advantage has no gradient. Samples
    of an older policy than old_logp's bring their importance weight in the advantage (arXiv
    2110.00641). No gradient flows into old_logp and advantage. Raises ValueError when shapes
    disagree.
    """
    _check(mask, new_logp=new_logp, old_logp=old_logp, advantage=advantage)
    rows = mask != 0
    ratio = _log_ratio(new_logp, old_logp, rows).exp()
    weight = torch.where(rows, advantage.detach(), 0.0)
    gain = torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight)
    return _total(-gain, rows)


def value_loss(value: Tensor, target: Tensor, mask: Tensor) -> Loss:
    """0.5 (value - target)^2 over the rows of mask; all of one shape."""
    _check(mask, value=value, target=target)
    rows = mask != 0
    return _total(0.5 * torch.where(rows, value - target.detach(), 0.0).square(), rows)


def clipped_value_loss(
    value: Tensor, old_value: Tensor, target: Tensor, mask: Tensor, *, clip: float
) -> Loss:
    """0.5 max((V - target)^2, (V' - target)^2) over the rows of mask, V' being V kept within
    old_value +- clip; all of one shape (detail 9 of "The 37 Implementation Details of PPO").

    A value that has moved by more than clip towards its target has no gradient. None flows into
    old_value and target.
    """
    _check(mask, value=value, old_value=old_value, target=target)
    rows = mask != 0
    error = torch.where(rows, value - target.detach(), 0.0)
    start = torch.where(rows, old_value - target, 0.0).detach()
    kept = start + (error - start).clamp(-clip, clip)
    return _total(0.5 * torch.maximum(error.square(), kept.square()), rows)


def entropy_loss(entropy: Tensor, mask: Tensor) -> Loss:
    """-entropy over the rows of mask, both of one shape: minimising it keeps the policy random."""
    _check(mask, entropy=entropy)
    rows = mask != 0
    return _total(-torch.where(rows, entropy, 0.0), rows)


def kl_estimate(new_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Loss:
    """r - 1 - log r over the rows of mask, r = exp(new_logp - old_logp), all of one shape.

    From actions of the old policy it estimates KL(old || new), is never negative and has little
    variance (Schulman 2020, "Approximating KL divergence"). For measuring only: without gradient.
    """
    _check(mask, new_logp=new_logp, old_logp=old_logp)
    rows = mask != 0
    log_ratio = _log_ratio(new_logp.detach(), old_logp, rows)
    return _total(log_ratio.expm1() - log_ratio, rows)


def _log_ratio(new_logp: Tensor, old_logp: Tensor, rows: Tensor) -> Tensor:
    """0 in masked rows: filled before exp, or a masked inf would make its gradient NaN."""
    return torch.where(rows, new_logp - old_logp.detach(), 0.0).clamp(max=_MAX_LOG_RATIO)


def _total(loss: Tensor, rows: Tensor) -> Loss:
    """Sum and count in float32 at least: bfloat16 cannot count beyond 256."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    return Loss(loss.sum(dtype=dtype), rows.sum(dtype=dtype))


def _check(mask: Tensor, **inputs: Tensor) -> None:
    """Raise ValueError unless all shapes are the mask's: [T, B] and [T, B, 1] would broadcast."""
    for name, tensor in inputs.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and mask {tuple(mask.shape)}: "
                "they must be equal. Squeeze the extra axis or drop the bootstrap row."
            )
