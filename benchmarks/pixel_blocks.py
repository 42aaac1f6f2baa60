"""Image torsos that read blocks of 4 x 4 pixels against the same ones over pixels, in bfloat16 on
one thread, with reading the uint8 frames; best of many. The ratio is what counts.

    python benchmarks/pixel_blocks.py
"""

from __future__ import annotations

from collections.abc import Callable

import measure
import torch
from dense_layers import seconds
from torch import Tensor

from unirl.policy.inputs import ImageLeaf
from unirl.policy.networks import NatureCNN, PixelConv, ShallowCNN

NUM_IMAGES = 128


def step(make: Callable[..., torch.nn.Module], size: int, x: Tensor, *, blocked: bool) -> float:
    """Seconds of one forward and backward pass over x."""
    image = ImageLeaf((), "CHW", 4, 84, 84, 1 / 255, blocked=blocked)
    network = make(image, size, torch.Generator().manual_seed(0)).bfloat16()
    return seconds(lambda: network(image.read(x, torch.bfloat16)).float().sum().backward())


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randint(0, 256, (NUM_IMAGES, 4, 84, 84), dtype=torch.uint8)
    rows = []
    for name, make, size in (
        ("first layer of 16", PixelConv, 16),
        ("first layer of 32", PixelConv, 32),
        ("shallow, 256", ShallowCNN, 256),
        ("nature, 512", NatureCNN, 512),
    ):
        plain, blocked = (step(make, size, x, blocked=each) * 1e6 for each in (False, True))
        per_image = [f"{each / NUM_IMAGES:.1f}" for each in (plain, blocked)]
        rows.append([name, *per_image, f"{plain / blocked:.2f}"])
    columns = ["us per image", "pixels", "blocks", "pixels / blocks"]
    text = measure.table(columns, rows)
    print(text)
    measure.write_block("pixel-blocks", text)


if __name__ == "__main__":
    main()
