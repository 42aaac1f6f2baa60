"""Linear layers over many rows on a CPU: oneDNN's matrix product where it beats MKL's, which torch
chooses and which does not use the widest registers of other makers' processors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_PRODUCTS = 1_500_000
"""Multiplications from which on oneDNN's start-up of 10 microseconds is paid for (measured)."""
MIN_WEIGHTS = 4096
"""Entries of a weight from which on the same holds for its gradient, whose operands are strided."""


def dense(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) for x [N, in], up to the order of additions, with its gradients."""
    if (
        x.dtype != torch.float32
        or x.device.type != "cpu"
        or x.shape[0] * layer.weight.numel() < MIN_PRODUCTS
        or torch.compiler.is_compiling()
        or not _has_onednn()
    ):
        return F.linear(x, layer.weight, layer.bias)
    result: Tensor = _Dense.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return result


class _Dense(torch.autograd.Function):
    """x W^T + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t(), None) if needs_x else None,
            _weight_gradient(grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, [out, in]. With the wider factor second it takes half to a sixth of the time."""
    if grad.shape[1] > x.shape[1]:
        return _weight_gradient(x, grad).t()
    if grad.shape[1] * x.shape[1] < MIN_WEIGHTS:
        return grad.t() @ x
    return _product(grad.t(), x.t(), None)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _has_onednn() -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
