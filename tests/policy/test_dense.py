"""Fast linear layers and activations give what torch's own give, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unirl.policy.activation import elu_
from unirl.policy.dense import MIN_PRODUCTS, dense

# Few and many rows, narrow and wide weights, wider in front and behind.
SHAPES = [
    (8, 4, 32),
    (60_000, 4, 32),
    (4096, 32, 32),
    (4096, 32, 1),
    (2048, 60, 256),
    (2048, 256, 64),
]


@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), SHAPES)
def test_a_dense_layer_is_a_linear_layer(num_rows: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(num_in, num_out)
    x = torch.randn(num_rows, num_in, requires_grad=True)
    direction = torch.randn(num_rows, num_out)

    def results(y: torch.Tensor) -> list[torch.Tensor]:
        return [y, *torch.autograd.grad((y * direction).sum(), (x, layer.weight, layer.bias))]

    for found, wanted in zip(results(dense(layer, x)), results(layer(x)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_the_shapes_above_take_both_ways() -> None:
    ways = {rows * num_in * num_out >= MIN_PRODUCTS for rows, num_in, num_out in SHAPES}
    assert ways == {True, False}


def test_double_precision_is_left_alone() -> None:
    layer, x = nn.Linear(64, 64).double(), torch.randn(4096, 64, dtype=torch.float64)
    assert torch.equal(dense(layer, x), layer(x))


def test_elu_is_torchs_elu_in_place() -> None:
    x = torch.cat((torch.linspace(-100, 100, 4001), torch.linspace(-1e-3, 1e-3, 101)))
    x.requires_grad_()
    fresh = x * 1.0
    found = elu_(fresh)
    wanted = F.elu(x)
    assert found.data_ptr() == fresh.data_ptr()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    (found_grad,) = torch.autograd.grad(found.square().sum(), x)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), x)
    torch.testing.assert_close(found_grad, wanted_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_elu_lets_what_is_not_finite_through_as_torch_does(value: float) -> None:
    x = torch.tensor([value])
    assert torch.equal(elu_(x.clone()).isnan(), F.elu(x).isnan())
    torch.testing.assert_close(elu_(x.clone()), F.elu(x), equal_nan=True)
