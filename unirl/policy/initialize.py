"""Layers with orthogonal weights (Saxe et al., arXiv 1312.6120), drawn from a given generator."""

from __future__ import annotations

import math

import torch
from torch import nn

HIDDEN_GAIN = math.sqrt(2.0)


def linear(num_in: int, num_out: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer, orthogonal with `gain`, bias 0; the global random state is left alone."""
    # Forked: the default initialisation draws from the global generator. (Building on the meta
    # device avoids it too, and imports sympy: 70 MB and a second.)
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def conv(
    num_in: int,
    num_out: int,
    kernel: int,
    gain: float,
    generator: torch.Generator,
    *,
    stride: int = 1,
    padding: int = 0,
) -> nn.Conv2d:
    """A convolution, orthogonal with `gain`, bias 0, its weight laid out channels_last."""
    with torch.random.fork_rng(devices=[]):
        layer = nn.Conv2d(num_in, num_out, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    layer.weight = nn.Parameter(layer.weight.detach().contiguous(memory_format=torch.channels_last))
    return layer
