"""Blocks of pixels: the same numbers as the convolution they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unirl.policy.blocks import TRANSPOSED, block_weight, to_blocks
from unirl.policy.inputs import ImageLeaf
from unirl.policy.networks import NatureCNN, ShallowCNN


def images(num: int, channels: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (num, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("shape", [(3, 4, 84, 84), (2, 1, 36, 44), (1, 3, 40, 36)])
def test_a_convolution_over_blocks_equals_that_over_pixels(shape: tuple[int, ...]) -> None:
    x = images(*shape)
    weight = torch.randn(5, shape[1], 8, 8, dtype=torch.float64, requires_grad=True)
    plain = F.conv2d(x.double(), weight, stride=4)
    blocked = F.conv2d(to_blocks(x).double(), block_weight(weight))
    torch.testing.assert_close(blocked, plain, atol=1e-9, rtol=1e-12)
    signal = torch.randn_like(plain)
    (expected,) = torch.autograd.grad(plain, weight, signal)
    (gradient,) = torch.autograd.grad(blocked, weight, signal)
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-12)


@pytest.mark.parametrize("shape", [(3, 4, 84, 84), (2, 1, 36, 44), (1, 6, 40, 36), (0, 4, 84, 84)])
def test_each_block_holds_its_pixels_channel_by_channel(shape: tuple[int, ...]) -> None:
    x, (num, channels, height, width) = images(*shape), shape
    split = x.reshape(num, channels, height // 4, 4, width // 4, 4)
    wanted = split.permute(0, 1, 3, 5, 2, 4).reshape(num, channels * 16, height // 4, width // 4)
    assert torch.equal(to_blocks(x), wanted)


def test_the_shapes_above_take_both_ways() -> None:
    assert 4 in TRANSPOSED and not {1, 6} & set(TRANSPOSED)


def test_rows_of_a_larger_tensor_and_strided_ones_are_read_rightly() -> None:
    x = images(6, 2, 40, 40)
    assert torch.equal(to_blocks(x)[1:3], to_blocks(x[1:3]))
    assert torch.equal(to_blocks(x)[::2], to_blocks(x[::2]))
    flipped = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(to_blocks(flipped), to_blocks(x))
    assert to_blocks(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("network", [NatureCNN, ShallowCNN])
def test_a_network_computes_the_same_either_way(network: type[NatureCNN | ShallowCNN]) -> None:
    plain = ImageLeaf((), "CHW", 4, 84, 84, 1 / 255)
    blocked = replace(plain, blocked=True)
    one, other = (
        network(image, 16, torch.Generator().manual_seed(1)).double() for image in (plain, blocked)
    )
    x = images(2, 4, 84, 84)
    outputs = [net(image.read(x, torch.float64)) for net, image in ((one, plain), (other, blocked))]
    assert outputs[0].abs().max() > 0
    torch.testing.assert_close(outputs[0], outputs[1])
    assert one.state_dict().keys() == other.state_dict().keys()
