"""The groups of a batch as flat tensors: per completion and per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.llm.group import FINISHES, Group
from unirl.llm.rewards.rewards import combine_tensors

_LENGTH = FINISHES.index("length")


@dataclass(frozen=True)
class TokenBatch:
    """S completions or episodes of all groups one after the other, and their N tokens."""

    groups: tuple[Group, ...]
    reward: Tensor
    """[S]: the weighted sum of the rewards; 0 where one is missing."""
    valid: Tensor
    """[S]: whether all rewards are there."""
    group: Tensor
    """[S]: which group, counted from 0 in this batch."""
    length: Tensor
    """[S]"""
    cut_off: Tensor
    """[S]: whether it ended because it had max_tokens."""
    learned: Tensor
    """[S]: whether it has a loss; statistics of groups count others too, where they are valid."""
    sequence: Tensor
    """[N]: which completion."""
    logp: Tensor
    """[N]: the engine's."""
    mask: Tensor
    """[N]: drawn by the policy, of a completion whose rewards are there."""
    version: Tensor
    """[N]"""

    @property
    def size(self) -> int:
        return self.reward.numel()

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        reward_weights: Sequence[float],
        *,
        mask_truncated: bool = False,
    ) -> TokenBatch:
        """Copies on the host. reward_weights: R; a reward of weight 0 may be missing.
        mask_truncated: completions that were cut off have no loss.
        """
        reward, valid = combine_tensors(
            torch.cat([one.reward for one in groups]),
            torch.cat([one.outcome for one in groups]),
            reward_weights,
        )
        sizes = torch.tensor([one.size for one in groups])
        first = (sizes.cumsum(0) - sizes).tolist()
        owner = torch.cat([one.owner + begin for one, begin in zip(groups, first, strict=True)])
        sequence = torch.repeat_interleave(owner, torch.cat([one.lengths for one in groups]))
        length = torch.bincount(sequence, minlength=int(sizes.sum()))
        cut_off = torch.cat([one.finish for one in groups]) == _LENGTH
        return cls(
            groups=tuple(groups),
            reward=reward,
            valid=valid,
            group=torch.repeat_interleave(torch.arange(len(groups)), sizes),
            length=length,
            cut_off=cut_off,
            learned=valid & ~cut_off if mask_truncated else valid,
            sequence=sequence,
            logp=torch.cat([one.logp for one in groups]),
            mask=torch.cat([one.mask for one in groups]) & valid[sequence],
            version=torch.cat([one.version for one in groups]),
        )

    @property
    def loss_mask(self) -> Tensor:
        """[N]: of the tokens that have a loss."""
        return self.mask & self.learned[self.sequence]

    def per_group(self, flags: Tensor) -> list[Tensor]:
        """[S] as one [G] for each group."""
        return list(torch.split(flags, [one.size for one in self.groups]))
