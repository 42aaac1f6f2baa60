"""A number that says whether two sets of weights are the same to the bit."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

_BLOCK = 128
"""Integers of eight bytes that are added up before the sum is weighted by its position."""
_MASK = (1 << 64) - 1


@torch.no_grad()
def checksum(
    weights: Mapping[str, Tensor] | torch.nn.Module, dtype: torch.dtype | None = None
) -> int:
    """Of all bits, names and (block by block) positions; the order of the names does not matter.
    dtype: what floating-point numbers become first, one tensor at a time.

    Exact: integers modulo 2^64, so equal on every device and with any number of threads. A module
    counts as its named parameters. Not made to withstand forgery.
    """
    if isinstance(weights, torch.nn.Module):
        weights = {name: value.detach() for name, value in weights.named_parameters()}
    # The sums stay where the weights are; one copy brings them all to the host.
    sums = [
        _tensor_sum(value if dtype is None or not value.is_floating_point() else value.to(dtype))
        for value in weights.values()
    ]
    if not sums:
        return 0
    total = 0
    for name, one in zip(weights, torch.stack(sums).tolist(), strict=True):
        total += (one & _MASK) * (2 * zlib.crc32(name.encode()) + 1)
    return total & _MASK


def digits(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """The checksum in hexadecimal digits: JSON has no integers of 64 bits."""
    return f"{checksum(weights, dtype):016x}"


def _tensor_sum(value: Tensor) -> Tensor:
    """Sum over blocks, each times an odd number that grows with its position; a scalar, int64."""
    flat = value.detach().contiguous().view(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()  # a view that begins within eight bytes cannot be read as integers
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8
    integers = octets[: whole * 8].view(torch.int64)
    rest = octets[whole * 8 :].sum(dtype=torch.int64)
    blocks = whole // _BLOCK
    sums = integers[: blocks * _BLOCK].view(blocks, _BLOCK).sum(1)
    position = torch.arange(1, 2 * blocks + 1, 2, device=flat.device)
    tail = integers[blocks * _BLOCK :].sum()
    return (sums * position).sum() + tail * (2 * blocks + 1) + rest * (2 * blocks + 3)
