"""Whitening of images: each pixel by its own running mean and standard deviation.

What matters in many games is a few pixels on a still background: in ALE/Pong-v5, played at random,
half of all pixels have a standard deviation below one level of 255, those that the ball crosses of
a few. Unwhitened, the first convolution's inputs are nearly all background, and gradient descent
is ill-conditioned (LeCun, Bottou, Orr and Mueller, "Efficient backprop", 1998, section 4.3). Burda
et al. (arXiv 1810.12894) whiten images so for random networks; here the policy reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unirl.policy.normalize import RunningNorm

MAX_ROWS = 64
"""Images of a batch that the statistics see: 2 048 of Pong's would be 0.5 GB in float64."""
_GOLDEN = 0.6180339887498949


class PixelNorm(nn.Module):
    """(x - mean) / sqrt(var + min_std^2) for uint8 images [N, C, H, W].

    Before the first update pixels are only scaled to 0..1. Where several processes learn, the
    statistics are those of all (RunningNorm.reduce).
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, shape: tuple[int, int, int], min_std: float) -> None:
        """min_std: how loud a pixel that hardly ever changes may become, in levels of 255."""
        super().__init__()
        self._min_std = min_std
        channels, height, width = shape
        # Channels last, as the images' memory is.
        self.statistics = RunningNorm((height, width, channels))
        # Actors get both as weights and need not work them out for each observation.
        self.register_buffer("scale", torch.full((height, width, channels), 1.0 / 255.0))
        self.register_buffer("shift", torch.zeros(height, width, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Whiten pixel values x [N, C, H, W], channels_last, of the compute dtype, in place."""
        scale, shift = (
            each.to(x.dtype).permute(2, 0, 1).expand_as(x) for each in (self.scale, self.shift)
        )
        # One pass, and one rounding: x * scale alone would lose in bfloat16 what is left over.
        return torch.addcmul(shift, x, scale, out=x)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None) -> None:
        self.statistics.update(x.permute(0, 2, 3, 1), mask)
        # Not before the first row, and without asking the device whether there was one.
        seen = self.statistics.count > 0
        scale = self.statistics.var.add(self._min_std**2).rsqrt_()
        shift = -self.statistics.mean * scale
        self.scale.copy_(torch.where(seen, scale, self.scale.double()))
        self.shift.copy_(torch.where(seen, shift, self.shift.double()))


def few_rows(x: Tensor) -> Tensor:
    """Which of x's rows `update` is given: at most MAX_ROWS of them, int64.

    Spread evenly, but not in step with the environments, which come in turn.
    """
    if x.shape[0] <= MAX_ROWS:
        return torch.arange(x.shape[0], device=x.device)
    position = torch.arange(MAX_ROWS, dtype=torch.float64, device=x.device) * _GOLDEN
    return ((position % 1.0) * x.shape[0]).long()
