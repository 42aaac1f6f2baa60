"""Images as blocks of 4 x 4 pixels: what a convolution of 8 x 8 with stride 4 reads, cheaper.

Such a convolution over C channels is one of 2 x 2 with stride 1 over 16 C channels, one for each
pixel of a block. Few channels are what matrix units serve worst: with 4 frames of 84 x 84 in
bfloat16 the first layer takes three quarters of its time on a CPU with AMX, reading included
(benchmarks/pixel_blocks.py).
Source: space to depth, as in the stem of TResNet (Ridnik et al., arXiv 2003.13630), but the
function, its parameters and its gradient stay those of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4
"""Pixels along a side: as many bytes as an int32 has."""
TRANSPOSED = range(2, 6)
"""Numbers of channels for which a CPU takes half to two thirds as long over two transposes as over
one permutation, with others longer (measured with AVX2, 16 and 128 images of 84 x 84).
"""


def to_blocks(x: Tensor) -> Tensor:
    """uint8 [N, C, H, W] -> [N, C * 16, H / 4, W / 4], channels_last; both sides divide by 4."""
    num, channels, height, width = x.shape
    height, width = height // BLOCK, width // BLOCK
    # Four neighbours travel as one number, so a row of a block is moved at once.
    rows = x.contiguous().view(torch.int32).reshape(num, channels, height, BLOCK, width)
    if x.device.type == "cpu" and channels in TRANSPOSED:
        # Lines of the image first, then a plain transpose of each image.
        lines = rows.transpose(2, 3).reshape(num, channels * BLOCK, height * width)
        rows = lines.transpose(1, 2).contiguous()
    else:
        rows = rows.permute(0, 2, 4, 1, 3).contiguous()  # [N, H / 4, W / 4, C, 4]
    blocks = rows.view(num, height, width, channels * BLOCK).view(torch.uint8)
    return blocks.permute(0, 3, 1, 2)


def block_weight(weight: Tensor) -> Tensor:
    """The weight [O, C, 8, 8] of a convolution with stride 4, for blocks: [O, C * 16, 2, 2]."""
    num_out, channels = weight.shape[:2]
    split = weight.reshape(num_out, channels, 2, BLOCK, 2, BLOCK).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(num_out, 2, 2, channels * BLOCK**2).permute(0, 3, 1, 2)
