"""Linear layers of the embedded engine in float32 on a CPU: by oneDNN instead of MKL, which leaves
half of the speed of processors that are not Intel's unused. Source: none.

Measured on one core of an EPYC with AVX-512, 256 rows, 128 to 384: 250 microseconds by MKL, 136 by
oneDNN. In bfloat16 torch calls oneDNN by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_FEWEST_ROWS = 32
"""With fewer, the 15 microseconds that a call of oneDNN takes outweigh what it saves."""


def quicken(model: torch.nn.Module) -> None:
    """Have the model's linear layers call oneDNN where it is worth it; weights stay where and as
    they are. Inference only: no gradient flows through.
    """
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: Any, rows: Tensor) -> Tensor:
    weight: Tensor = module.weight
    if (
        rows.dtype != torch.float32
        or weight.dtype != torch.float32
        or rows.device.type != "cpu"
        or rows.shape[-2] < _FEWEST_ROWS
    ):
        return functional.linear(rows, weight, module.bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, module.bias, "none", [], "")
    return result
