"""Bookkeeping of the episodes of N environments on one device: time limits, random phases, states
that are not finite, and what to reset. Tensors are written in place, and nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 1e15
"""A state whose absolute entries add up to more than this is as lost as one that is not a number;
their squares still fit in float32."""


class Episodes:
    """Where N episodes stand, and how the last step ended them.

    length: steps after which an episode is truncated. noise_size: how many random numbers a reset
    of one row needs.
    """

    def __init__(self, num_envs: int, length: int, noise_size: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.length = length
        self.steps = zeros(torch.int64, num_envs)
        """Taken in the present episode."""
        self.terminated = zeros(torch.bool, num_envs)
        """The last step ended the episode by the task's rules."""
        self.truncated = zeros(torch.bool, num_envs)
        """The last step reached the time limit, and did not terminate."""
        self.valid = zeros(torch.bool, num_envs).logical_not_()
        """The last step led to a finite state."""
        self.invalid = zeros(torch.bool, num_envs)
        self.alive = zeros(torch.bool, num_envs)
        """Valid and not terminated."""
        self.done = zeros(torch.bool, num_envs)
        """Terminated, truncated or not valid: the row starts again."""
        self.nan_states = zeros(torch.int64)
        """Rows that were not valid, since the environments were made."""
        self.generator = torch.Generator(device)
        """All randomness of the simulator."""
        self.bits = zeros(torch.int64, -(-noise_size // 4), num_envs)
        """Those of one draw."""
        self.draws = self.bits.view(torch.int16).view(-1, num_envs)[:noise_size]
        """The same bits, as D numbers for each row: [D, N]."""


def begin(episodes: Episodes, seed: int, random_phases: bool) -> None:
    """Seed the generator and set the steps to 0, or to uniform draws from [0, length)."""
    episodes.generator.manual_seed(seed)
    if random_phases:
        episodes.steps.random_(0, episodes.length, generator=episodes.generator)
    else:
        episodes.steps.zero_()


def noise_scale(spans: Sequence[float], like: Tensor) -> Tensor:
    """The scale for `draw_noise`, [D, 1]: number d is drawn from [-spans[d], spans[d])."""
    return torch.tensor(spans, dtype=like.dtype, device=like.device).unsqueeze(1).mul_(2.0**-15)


def draw_noise(episodes: Episodes, scale: Tensor, out: Tensor) -> Tensor:
    """Fill `out` [D, N] with uniform numbers from [-span, span); scale: span / 2**15, [D, 1].

    Each number has 16 random bits, a quarter of one int64 draw: on a CPU three times faster than
    one draw per number, and far finer than any reset needs.
    """
    episodes.bits.random_(-(2**63), None, generator=episodes.generator)
    out.copy_(episodes.draws)
    return out.mul_(scale)


def end_step(episodes: Episodes, failed: Tensor | None, size: Tensor) -> None:
    """Count the step, and decide which episodes it ended.

    failed: bool [N], the task's own rule, or None where only the time limit ends an episode. size:
    [N], the sum of the absolute entries of each state. Afterwards rows with `done` must be reset.
    """
    torch.le(size, LARGEST, out=episodes.valid)  # NaN is not <= anything
    torch.logical_not(episodes.valid, out=episodes.invalid)
    episodes.nan_states.add_(torch.count_nonzero(episodes.invalid))
    # Comparisons of flags are one kernel where two logical operations would be two.
    if failed is None:
        alive = episodes.valid
    else:
        torch.logical_and(failed, episodes.valid, out=episodes.terminated)
        alive = torch.gt(episodes.valid, episodes.terminated, out=episodes.alive)
    episodes.steps.add_(1)
    torch.ge(episodes.steps, episodes.length, out=episodes.truncated)
    episodes.truncated.logical_and_(alive)
    torch.le(alive, episodes.truncated, out=episodes.done)
    episodes.steps.masked_fill_(episodes.done, 0)
