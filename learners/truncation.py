"""Episodes that a time limit cut off, where the simulator begins the next one within the same step:
the row after them belongs to another episode, so their value enters through the reward.

Pardo et al., "Time limits in reinforcement learning" (arXiv 1712.00378), partial-episode
bootstrapping.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bootstrapped(reward: Tensor, truncated: Tensor, value: Tensor, gamma: float) -> Tensor:
    """Rewards [T, B] with gamma * value added where an episode was cut off.

    truncated: bool [T, B]; value: [T, B], read there only. Together with a discount of 0 in these
    rows this is what a row with the true final observation would say. No gradient flows out.
    """
    with torch.no_grad():
        return torch.where(truncated, torch.add(reward, value, alpha=gamma), reward)


def spread(final_value: Tensor, truncated: Tensor) -> Tensor:
    """Values of final observations, at the rows that they belong to: [K, B] -> [T, B].

    final_value[k, b] is that of the k-th truncation of environment b in this unroll, as the device
    actor stores them; there are never more than K. truncated: bool [T, B]. Elsewhere the result
    means nothing.
    """
    if final_value.shape[0] == 1:
        return final_value.expand(truncated.shape)
    which = truncated.cumsum(0).sub_(1).clamp_(0, final_value.shape[0] - 1)
    return final_value.gather(0, which)
