"""Image networks against the plain layers of torch.nn, and activations against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unirl.policy.activation import tanh
from unirl.policy.initialize import conv, linear
from unirl.policy.inputs import ImageLeaf, smallest_image
from unirl.policy.networks import ImpalaCNN, NatureCNN, ShallowCNN


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pixels(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 4, height, width), generator=generator()).float()


def image(height: int, width: int, stride: int = 4) -> ImageLeaf:
    return ImageLeaf((), "CHW", 4, height, width, 1 / 255, stride=stride)


def test_nature_cnn_is_the_paper_s_stack_on_pixels_between_0_and_1() -> None:
    network = NatureCNN(image(84, 72), 512, generator())
    first = nn.Conv2d(4, 32, 8, 4)
    first.load_state_dict(network.conv1.state_dict())
    plain = nn.Sequential(first, nn.ReLU(), network.conv2, nn.ReLU(), network.conv3, nn.ReLU())
    x = pixels(84, 72)
    features = plain(x / 255)
    assert features.shape == (3, 64, 7, 5)
    # The linear layer reads pixel by pixel, not channel by channel.
    expected = torch.relu(network.linear(features.permute(0, 2, 3, 1).reshape(3, -1)))
    torch.testing.assert_close(network(x), expected)


def test_shallow_cnn_is_the_paper_s_stack() -> None:
    network = ShallowCNN(image(84, 72), 256, generator())
    first = nn.Conv2d(4, 16, 8, 4)
    first.load_state_dict(network.conv1.state_dict())
    plain = nn.Sequential(first, nn.ReLU(), network.conv2, nn.ReLU())
    x = pixels(84, 72)
    features = plain(x / 255)
    assert features.shape == (3, 32, 9, 7)
    expected = torch.relu(network.linear(features.permute(0, 2, 3, 1).reshape(3, -1)))
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize("torso", [NatureCNN, ShallowCNN])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_as_many_strides_give_layers_of_the_same_size(
    torso: type[NatureCNN | ShallowCNN], stride: int
) -> None:
    whole = torso(image(84, 72), 8, generator())
    network = torso(image(21 * stride, 18 * stride, stride), 8, generator())
    assert network.conv1.weight.shape[2:] == (2 * stride, 2 * stride)
    assert network.linear.weight.shape == whole.linear.weight.shape
    x = pixels(21 * stride, 18 * stride)
    first = torch.nn.functional.conv2d(
        x / 255, network.conv1.weight, network.conv1.bias, stride=stride
    )
    torch.testing.assert_close(network.conv1(x), first)
    assert network(x).shape == (3, 8)


@pytest.mark.parametrize(("name", "torso"), [("nature", NatureCNN), ("shallow", ShallowCNN)])
@pytest.mark.parametrize("stride", [1, 2, 4, 5])
def test_the_smallest_image_is_just_large_enough(
    name: str, torso: type[NatureCNN | ShallowCNN], stride: int
) -> None:
    size = smallest_image(name, stride)
    network = torso(image(size, size, stride), 8, generator())
    assert network(pixels(size, size)).shape == (3, 8)
    with pytest.raises(RuntimeError, match="size"):
        network(pixels(size - 1, size))


def test_impala_cnn_is_the_paper_s_residual_stack() -> None:
    network = ImpalaCNN(image(30, 21), 256, generator())
    pool = nn.MaxPool2d(3, 2, 1)
    x = pixels(30, 21)
    h = x / 255
    for entry, blocks in zip(network.entries, network.blocks, strict=True):
        h = pool(entry(h))
        for block in blocks:
            h = h + block.conv2(torch.relu(block.conv1(torch.relu(h))))
    assert h.shape == (3, 32, 4, 3)
    expected = torch.relu(network.linear(torch.relu(h).permute(0, 2, 3, 1).reshape(3, -1)))
    torch.testing.assert_close(network(x), expected)


def test_gradients_flow_through_every_parameter_of_the_image_networks() -> None:
    for network, size in (
        (NatureCNN(image(36, 36), 8, generator()), 36),
        (ShallowCNN(image(20, 20), 8, generator()), 20),
        (ImpalaCNN(image(16, 16), 8, generator()), 16),
    ):
        network(pixels(size, size)).square().sum().backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_tanh_and_its_gradient_are_tanh_s() -> None:
    x = torch.linspace(-20, 20, 10001, requires_grad=True)
    (grad,) = torch.autograd.grad(tanh(x).sum(), x)
    exact = torch.tanh(x.detach().double())
    assert (tanh(x).detach() - exact).abs().max() < 4e-7
    assert (grad - (1 - exact.square())).abs().max() < 4e-7


def test_tanh_of_bfloat16_is_exact_around_zero() -> None:
    x = torch.tensor([1e-3, -1e-4]).bfloat16()
    assert torch.equal(tanh(x), torch.tanh(x))


def test_layers_are_orthogonal_with_their_gain() -> None:
    weight = linear(64, 16, 0.5, generator()).weight.detach()
    torch.testing.assert_close(weight @ weight.T, 0.25 * torch.eye(16))
    kernel = conv(3, 8, 3, 2.0, generator()).weight.detach()
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    flat = kernel.flatten(1)
    torch.testing.assert_close(flat @ flat.T, 4.0 * torch.eye(8))
