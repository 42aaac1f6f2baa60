"""UniRL's dense layer and elu against torch's own, forward and backward, on one thread; best of
many, in turn. The ratio is what counts.

    python benchmarks/dense_layers.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.policy.activation import elu_
from unirl.policy.dense import dense

SHAPES = ((8192, 4, 32), (8192, 32, 32), (8192, 60, 256), (8192, 256, 128), (8192, 128, 64))


def seconds(step: Callable[[], object], tries: int = 60) -> float:
    """The fastest of several calls."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def forward_and_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    """One pass each way, with the gradient of the input too."""
    return lambda: function(x * 1.0).sum().backward()


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for num_rows, num_in, num_out in SHAPES:
        layer, x = nn.Linear(num_in, num_out), torch.randn(num_rows, num_in, requires_grad=True)
        theirs = seconds(forward_and_backward(layer, x))
        ours = seconds(forward_and_backward(lambda y, layer=layer: dense(layer, y), x))
        name = f"linear {num_in} -> {num_out}"
        rows.append([name, f"{1e6 * theirs:,.0f}", f"{1e6 * ours:,.0f}", f"{theirs / ours:.2f}"])
    x = torch.randn(8192, 32, requires_grad=True)
    theirs, ours = seconds(forward_and_backward(F.elu_, x)), seconds(forward_and_backward(elu_, x))
    rows.append(
        ["elu, 32 wide", f"{1e6 * theirs:,.0f}", f"{1e6 * ours:,.0f}", f"{theirs / ours:.2f}"]
    )
    text = measure.table(["8,192 rows", "torch, us", "UniRL, us", "torch / UniRL"], rows)
    print(text)
    measure.write_block("dense-layers", text)


if __name__ == "__main__":
    main()
