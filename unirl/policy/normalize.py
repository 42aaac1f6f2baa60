"""Running statistics: whitening of observations, and the scale of discounted returns.

Statistics merge chunk by chunk with the parallel formula of Chan, Golub and LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances" (1979), so the order and size of
chunks do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from unirl.errors import UniRLError

Reduce: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Sums each tensor over all processes that see a part of the data."""


class RunningNorm(nn.Module):
    """Mean and (population) variance of everything seen, per element of `shape`; float64 buffers.

    Before the first update it is the identity, up to the clip.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    reduce: Reduce | None
    """Where others see data too: every update then merges the rows of all, and all come to the
    same statistics. None: this process sees everything.
    """

    def __init__(
        self, shape: tuple[int, ...] = (), *, clip: float = 10.0, epsilon: float = 1e-8
    ) -> None:
        super().__init__()
        self.clip, self.epsilon, self.reduce = clip, epsilon, None
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merge rows x [..., *shape] where mask [...] is true; None: all rows."""
        num_lead = x.dim() - self.mean.dim()
        lead = x.shape[: max(num_lead, 0)]
        if x.shape[len(lead) :] != self.mean.shape or (mask is not None and mask.shape != lead):
            raise UniRLError(
                f"statistics of shape {tuple(self.mean.shape)} cannot take x {tuple(x.shape)} "
                f"with mask {None if mask is None else tuple(mask.shape)}",
                "x must be [..., *shape] and mask [...]",
                "pass one mask entry per row of x",
            )
        rows = x.reshape(-1, *self.mean.shape).double()
        keep = rows.new_ones(rows.shape[0]) if mask is None else mask.reshape(-1).double()
        weight = keep.reshape(-1, *([1] * self.mean.dim()))
        # A masked row may hold anything, NaN included, so it is replaced rather than multiplied by
        # 0.
        rows = torch.where(weight > 0, rows, 0.0)
        num_rows, total_x = self._over_all(keep.sum(), rows.sum(0))
        mean = total_x / num_rows.clamp(min=1.0)
        # About the mean of all rows, in a second sum: the first one's squares would cancel.
        (squares,) = self._over_all(((rows - mean).square() * weight).sum(0))

        total = (self.count + num_rows).clamp(min=1.0)
        delta = mean - self.mean
        squares += self.var * self.count + delta.square() * (self.count * num_rows / total)
        # An empty first chunk must leave the identity, not a variance of 0.
        self.var.copy_(torch.where(self.count + num_rows > 0, squares / total, self.var))
        self.mean.add_(delta * (num_rows / total))
        self.count.add_(num_rows)

    def _over_all(self, *sums: Tensor) -> Sequence[Tensor]:
        return sums if self.reduce is None else self.reduce(sums)

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / std in float32, clipped to +-clip; x [..., *shape]."""
        inv_std = self.var.add(self.epsilon).rsqrt_().float()
        return (x.float() - self.mean.float()).mul_(inv_std).clamp_(-self.clip, self.clip)

    def restore(self, x: Tensor) -> Tensor:
        """What `normalize` had made x of, up to the clip: x * std + mean in float32."""
        std = self.var.add(self.epsilon).sqrt_().float()
        return torch.addcmul(self.mean.float(), x.float(), std)


class ReturnNorm(nn.Module):
    """Divides rewards by the standard deviation of the running discounted return; the mean stays.

    The reward scaling of Engstrom et al., "Implementation matters in deep policy gradients" (arXiv
    2005.12729).
    """

    def __init__(self, *, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip, self.epsilon = clip, epsilon
        self.returns = RunningNorm((), clip=clip, epsilon=epsilon)

    @torch.no_grad()
    def update(
        self, reward: Tensor, done: Tensor, mask: Tensor, carry: Tensor, gamma: float
    ) -> Tensor:
        """Merge the discounted returns of an unroll; returns the carry [B] after the last row.

        reward float, done and mask bool [T, B]; carry [B] is each environment's discounted sum
        before row 0, and starts again at 0 after a row with done. Filler rows (mask false) neither
        count nor change it. Raises UniRLError when the shapes disagree.
        """
        shape = reward.shape
        if (
            reward.dim() != 2
            or done.shape != shape
            or mask.shape != shape
            or carry.shape != shape[1:]
        ):
            raise UniRLError(
                f"reward {tuple(shape)}, done {tuple(done.shape)}, mask {tuple(mask.shape)}, "
                f"carry {tuple(carry.shape)} do not fit together",
                "reward, done and mask must be [T, B] and carry [B]",
                "pass one time-major unroll",
            )
        total = carry.double()
        seen = torch.empty(shape, dtype=torch.float64, device=reward.device)
        alive = (~done).double()
        for t in range(shape[0]):
            new_total = torch.add(reward[t], total, alpha=gamma)
            seen[t] = new_total
            total = torch.where(mask[t], new_total * alive[t], total)
        self.returns.update(seen, mask)
        return total.to(carry.dtype)

    def scale(self, reward: Tensor) -> Tensor:
        """Rewards over the returns' standard deviation, float32, clipped to +-clip; same shape."""
        inv_std = self.returns.var.add(self.epsilon).rsqrt_().float()
        return (reward.float() * inv_std).clamp_(-self.clip, self.clip)
