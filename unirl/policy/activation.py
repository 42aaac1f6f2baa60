"""Activations of the MLPs and recurrent cores, in the form that is fastest where they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def tanh(x: Tensor) -> Tensor:
    """tanh(x), same shape; absolute error below 4e-7.

    On CPU in float32 torch's sigmoid is vectorised and its tanh is not (4x slower): 2 sigmoid(2x) -
    1 is the same. In bfloat16 that difference would lose most of the digits around 0.
    """
    if x.dtype != torch.float32 or x.is_cuda:
        return torch.tanh(x)
    return torch.rsub(torch.sigmoid(x * 2.0), -1.0, alpha=-2.0)


def relu_(x: Tensor) -> Tensor:
    """max(x, 0) in place: for the fresh output of a linear layer or convolution, which saves
    nothing of it.
    """
    return torch.relu_(x)


def elu_(x: Tensor) -> Tensor:
    """x where positive, exp(x) - 1 elsewhere, in place; absolute error below 1e-7.

    Torch's exp on a CPU takes five times as long as its exp2, and its elu is made of it.
    """
    if x.dtype != torch.float32 or x.is_cuda or torch.compiler.is_compiling():
        return F.elu_(x)
    result: Tensor = _Elu.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Elu(torch.autograd.Function):
    """max(x, 2^(min(x, 0) log2 e) - 1), in place; the gradient needs only what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        below = torch.clamp_max(x, 0.0).mul_(_LOG2_E).exp2_().sub_(1.0)
        torch.maximum(x, below, out=x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        grad: Tensor = torch.ops.aten.elu_backward(grads[0], 1.0, 1.0, 1.0, True, y)
        return grad


_LOG2_E = math.log2(math.e)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"tanh": tanh, "relu": relu_, "elu": elu_}
)
"""By the name that policy.activation gives them."""
