"""Whether an engine really computes with the weights it was sent: exact readings of what it
multiplies with, even where kernels keep a repacked copy that no longer looks like the weights.

A column of a linear layer is what the layer returns for a one-hot input, bit for bit:
all other products are 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.core.weights import Weights
from unirl.llm.models.checksum import digits

NUM_COLUMNS = 16
"""Columns of each matrix that are read back; others with each version."""


def columns(width: int, version: int) -> list[int]:
    """Which columns of a matrix of this width are read back for this version: ascending."""
    count = min(NUM_COLUMNS, width)
    return sorted(random.Random(version * 1_000_003 + width).sample(range(width), count))


@torch.no_grad()
def sampled(value: Tensor, version: int, dtype: torch.dtype) -> Tensor:
    """What is compared of one tensor: some columns of a matrix [N, K], all of anything else."""
    if value.ndim == 2:
        value = value[:, columns(value.shape[1], version)]
    return canonical(value, dtype)


def canonical(value: Tensor, dtype: torch.dtype) -> Tensor:
    """In the engine's dtype, with one zero only: sums of products lose the sign of -0."""
    return (value.to(dtype) if value.is_floating_point() else value) + 0


def unnamed_reading(value: Tensor) -> str:
    """A reading that does not depend on what the tensor is called: adapters are renamed."""
    return digits({"": canonical(value.cpu(), value.dtype)})


def expected(weights: Weights, version: int, dtype: torch.dtype) -> dict[str, str]:
    return {name: digits({name: sampled(one, version, dtype)}) for name, one in weights.items()}


def differences(
    wanted: Mapping[str, str], computed: Sequence[Sequence[str]], received: Sequence[str]
) -> str:
    """What is wrong with a worker's report, as a sentence; "" when all is well.

    computed: (path in the worker's model, name as sent, reading) of what it computes with.
    received: names of which the worker can prove only that they arrived.
    """
    wrong = [f"{path} (sent as {name})" for path, name, found in computed if wanted[name] != found]
    if wrong:
        more = f" and {len(wrong) - 3} more" if wrong[3:] else ""
        return f"{', '.join(wrong[:3])}{more} of {len(computed)} readings differ"
    seen = {name for _, name, _ in computed} | set(received)
    missing = [name for name in wanted if name not in seen]
    if missing:
        return f"{len(missing)} of {len(wanted)} tensors never arrived, such as {missing[0]}"
    return ""
