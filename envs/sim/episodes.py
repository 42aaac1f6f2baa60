"""Bookkeeping of the episodes of N environments on one device: time limits, random phases, states
that are not finite, and what to reset. Tensors are written in place, and nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 1e15
"""A state whose absolute entries add up to more than this is as lost as one that is not a number;
their squares still fit in float32."""


@dataclass(slots=True)
class Episodes:
    """Where N episodes stand, and how the last step ended them."""

    steps: Tensor
    """int64 [N]: steps taken in the present episode."""
    length: int
    """Steps after which an episode is truncated."""
    terminated: Tensor
    """bool [N]: the last step ended the episode by the task's rules."""
    truncated: Tensor
    """bool [N]: the last step reached the time limit, and did not terminate."""
    valid: Tensor
    """bool [N]: the last step led to a finite state."""
    done: Tensor
    """bool [N]: terminated, truncated or not valid: the row starts again."""
    alive: Tensor
    """bool [N]: valid and not terminated."""
    invalid: Tensor
    """bool [N]: not valid."""
    nan_states: Tensor
    """int64 scalar: rows that were not valid, since the environments were made."""
    generator: torch.Generator
    """All randomness of the simulator."""
    bits: Tensor
    """int64 [ceil(D / 4), N]: the random bits of one draw."""
    draws: Tensor
    """int16 [D, N]: the same bits, as D numbers for each row."""


def new_episodes(num_envs: int, length: int, noise_size: int, device: torch.device) -> Episodes:
    """Buffers for N episodes; noise_size: how many random numbers a reset of one row needs."""

    def flags() -> Tensor:
        return torch.zeros(num_envs, dtype=torch.bool, device=device)

    bits = torch.zeros((-(-noise_size // 4), num_envs), dtype=torch.int64, device=device)
    return Episodes(
        steps=torch.zeros(num_envs, dtype=torch.int64, device=device),
        length=length,
        terminated=flags(),
        truncated=flags(),
        valid=flags().logical_not_(),
        done=flags(),
        alive=flags(),
        invalid=flags(),
        nan_states=torch.zeros((), dtype=torch.int64, device=device),
        generator=torch.Generator(device),
        bits=bits,
        draws=bits.view(torch.int16).view(-1, num_envs)[:noise_size],
    )


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
