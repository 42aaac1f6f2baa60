"""A small batch of packed tokens for tests, with whatever a masked token may hold."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Packed tokens in float64; num completions, one of which drew no token."""

    new_logp: Tensor
    old_logp: Tensor
    logp: Tensor
    advantage: Tensor
    mask: Tensor
    sequence: Tensor
    num: int


def batch(seed: int = 0, *, garbage: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(num: int) -> Tensor:
        return torch.randn(num, generator=generator, dtype=torch.float64)

    length = torch.tensor([5, 1, 7, 3, 2, 6])
    sequence = torch.arange(6).repeat_interleave(length)
    num = sequence.numel()
    mask = (torch.rand(num, generator=generator) > 0.25) & (sequence != 4)
    old = -normal(num).abs() - 0.05
    values = [old + 0.3 * normal(num), old, old + 0.4 * normal(num), normal(num)]
    if garbage:  # what masked tokens hold must not matter
        for value, filler in zip(values, (math.nan, math.inf, -math.inf, math.nan), strict=True):
            value[~mask] = filler
    return Batch(*values, mask=mask, sequence=sequence, num=6)


def take(one: Batch, tokens: Tensor, completions: Tensor | None = None) -> Batch:
    """Some tokens, in that order, their completions numbered again where asked."""
    values = [value[tokens] for value in one[:6]]
    if completions is None:
        return Batch(*values, num=one.num)
    number = torch.full((one.num,), -1)
    number[completions] = torch.arange(completions.numel())
    values[5] = number[values[5]]
    return Batch(*values, num=completions.numel())


def gradient(total: Tensor, by: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(total, by)
    return found
