"""Feed-forward networks: MLP, Nature CNN, IMPALA's two CNNs, and the torso they form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.policy.activation import ACTIVATIONS, relu_
from unirl.policy.blocks import block_weight
from unirl.policy.config import ActivationName, PolicyConfig
from unirl.policy.dense import dense
from unirl.policy.initialize import HIDDEN_GAIN, conv, linear
from unirl.policy.inputs import ImageLeaf, Inputs, ObservationInputs


class MLP(nn.Module):
    """Linear layers, each followed by the activation: [N, num_in] -> [N, num_out]."""

    def __init__(
        self,
        num_in: int,
        hidden: tuple[int, ...],
        activation: ActivationName,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        widths = (num_in, *hidden)
        self.num_out = widths[-1]
        self.activation = ACTIVATIONS[activation]
        self.layers = nn.ModuleList(
            linear(before, after, HIDDEN_GAIN, generator)
            for before, after in zip(widths, hidden, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(dense(layer, x))  # type: ignore[arg-type]
        return x


class PixelConv(nn.Module):
    """The first layer of the Nature CNN and its kin, over unscaled pixels: 8 x 8 with stride 4, or
    another stride and twice its width.
    """

    def __init__(self, image: ImageLeaf, num_out: int, generator: torch.Generator) -> None:
        super().__init__()
        self.stride = image.stride
        width = 2 * self.stride
        layer = conv(image.channels, num_out, width, HIDDEN_GAIN, generator, stride=self.stride)
        self.weight, self.bias = layer.weight, layer.bias
        self.scale, self.blocked = image.scale, image.blocked
        self.out_sizes = tuple(size // self.stride - 1 for size in (image.height, image.width))
        """Height and width of what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.scale
        if self.blocked:
            return F.conv2d(x, block_weight(weight), self.bias)
        return F.conv2d(x, weight, self.bias, stride=self.stride)


class NatureCNN(nn.Module):
    """Three convolutions and a linear layer: pixels as read from the image -> [N, num_out].

    Mnih et al., "Human-level control through deep reinforcement learning" (Nature 2015), methods.
    """

    def __init__(self, image: ImageLeaf, num_out: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_out = num_out
        self.conv1 = PixelConv(image, 32, generator)
        self.conv2 = conv(32, 64, 4, HIDDEN_GAIN, generator, stride=2)
        self.conv3 = conv(64, 64, 3, HIDDEN_GAIN, generator)
        height, width = ((size - 4) // 2 + 1 - 2 for size in self.conv1.out_sizes)
        self.linear = linear(64 * height * width, num_out, HIDDEN_GAIN, generator)

    def forward(self, x: Tensor) -> Tensor:
        x = relu_(self.conv1(x))
        x = relu_(self.conv2(x))
        x = relu_(self.conv3(x))
        return relu_(self.linear(flatten_pixels(x)))


class ShallowCNN(nn.Module):
    """Two convolutions and a linear layer: pixels as read from the image -> [N, num_out].

    The network of A3C (Mnih et al., arXiv 1602.01783, section 8) and IMPALA's shallow model (arXiv
    1802.01561, figure 3, left); both have num_out 256. Less than half of the Nature CNN's cost.
    """

    def __init__(self, image: ImageLeaf, num_out: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_out = num_out
        self.conv1 = PixelConv(image, 16, generator)
        self.conv2 = conv(16, 32, 4, HIDDEN_GAIN, generator, stride=2)
        height, width = ((size - 4) // 2 + 1 for size in self.conv1.out_sizes)
        self.linear = linear(32 * height * width, num_out, HIDDEN_GAIN, generator)

    def forward(self, x: Tensor) -> Tensor:
        return relu_(self.linear(flatten_pixels(relu_(self.conv2(relu_(self.conv1(x)))))))


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), 3x3, same shape."""

    def __init__(self, channels: int, gain: float, generator: torch.Generator) -> None:
        super().__init__()
        self.conv1 = conv(channels, channels, 3, HIDDEN_GAIN, generator, padding=1)
        self.conv2 = conv(channels, channels, 3, gain, generator, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.conv2(relu_(self.conv1(torch.relu(x))))
        return inner.add_(x)


class ImpalaCNN(nn.Module):
    """Three sections of convolution, pooling and two residual blocks, then a linear layer.

    [N, C, H, W] unscaled pixels -> [N, num_out].
    Espeholt et al., IMPALA (arXiv 1802.01561), figure 3, right.
    """

    def __init__(self, image: ImageLeaf, num_out: int, generator: torch.Generator) -> None:
        super().__init__()
        self.scale, self.num_out = image.scale, num_out
        depths, num_blocks = (16, 32, 32), 2
        # Residual branches start small, so that activations do not grow with the number of blocks.
        gain = HIDDEN_GAIN / (len(depths) * num_blocks) ** 0.5
        self.entries, self.blocks = nn.ModuleList(), nn.ModuleList()
        channels, height, width = image.channels, image.height, image.width
        for depth in depths:
            self.entries.append(conv(channels, depth, 3, HIDDEN_GAIN, generator, padding=1))
            self.blocks.append(
                nn.Sequential(*(ResidualBlock(depth, gain, generator) for _ in range(num_blocks)))
            )
            channels, height, width = depth, (height + 1) // 2, (width + 1) // 2
        self.linear = linear(channels * height * width, num_out, HIDDEN_GAIN, generator)

    def forward(self, x: Tensor) -> Tensor:
        first = True
        for entry, blocks in zip(self.entries, self.blocks, strict=True):
            weight: Tensor = entry.weight * self.scale if first else entry.weight  # type: ignore[assignment,operator]
            x = F.conv2d(x, weight, entry.bias, padding=1)  # type: ignore[arg-type]
            x = blocks(F.max_pool2d(x, 3, stride=2, padding=1))
            first = False
        return relu_(self.linear(relu_(flatten_pixels(x))))


CNNS = {"nature": NatureCNN, "shallow": ShallowCNN, "impala": ImpalaCNN}


class Torso(nn.Module):
    """Features [N, num_out]: those of one network per image and of one MLP over the vector.

    Several of these are mixed by a further layer, unless a recurrent core does so: linear heads on
    top of them could only add what one says to what the other says.
    """

    def __init__(
        self, inputs: ObservationInputs, config: PolicyConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        network = CNNS.get(config.torso, NatureCNN)
        self.images = nn.ModuleList(
            network(image, config.feature_size, generator) for image in inputs.images
        )
        self.mlp: MLP | None = None
        self.num_out = config.feature_size * len(self.images)
        if inputs.vector_size:
            self.mlp = MLP(inputs.vector_size, config.hidden, config.activation, generator)
            self.num_out += self.mlp.num_out
        self.mix: nn.Linear | None = None
        num_parts = len(self.images) + (self.mlp is not None)
        if num_parts > 1 and config.core == "none":
            self.mix = linear(self.num_out, config.feature_size, HIDDEN_GAIN, generator)
            self.num_out = config.feature_size

    def forward(self, inputs: Inputs) -> Tensor:
        features: list[Tensor] = [
            network(image) for network, image in zip(self.images, inputs.images, strict=True)
        ]
        if self.mlp is not None and inputs.vector is not None:
            features.append(self.mlp(inputs.vector))
        if len(features) == 1:
            return features[0]
        x = torch.cat(features, dim=1)
        if self.mix is not None:
            x = relu_(self.mix(x))
        return x


def flatten_pixels(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, H * W * C]: in channels_last a view, unlike [N, C * H * W]."""
    return x.permute(0, 2, 3, 1).flatten(1)
