"""Losses that carry numerator and denominator, so that micro-batches add up to the whole batch.

The actor-critic losses of IMPALA, arXiv 1802.01561, section 4.2. All are to be minimised.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    """-new_logp * advantage over the rows of mask; all of one shape.

    No gradient flows into the advantage. Raises ValueError when shapes disagree.
    """
    _check(mask, new_logp=new_logp, advantage=advantage)
    rows = mask != 0
    # Both factors are filled: filling only their product lets a masked NaN into the gradient.
    weight = torch.where(rows, advantage.detach(), 0.0)
    return _total(-torch.where(rows, new_logp, 0.0) * weight, rows)


def value_loss(value: Tensor, target: Tensor, mask: Tensor) -> Loss:
    """0.5 (value - target)^2 over the rows of mask; all of one shape.

    No gradient flows into the target. Raises ValueError when shapes disagree.
    """
    _check(mask, value=value, target=target)
    rows = mask != 0
    return _total(0.5 * torch.where(rows, value - target.detach(), 0.0).square(), rows)


def entropy_loss(entropy: Tensor, mask: Tensor) -> Loss:
    """-entropy over the rows of mask, both of one shape: minimising it keeps the policy random.

    Raises ValueError when shapes disagree.
    """
    _check(mask, entropy=entropy)
    rows = mask != 0
    return _total(-torch.where(rows, entropy, 0.0), rows)


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
