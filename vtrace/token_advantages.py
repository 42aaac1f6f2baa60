"""Advantages per token: returns, GAE and V-trace over packed completions.

REINFORCE++: arXiv 2501.03262 (returns, whitened over the batch). PPO with GAE: arXiv 1506.02438,
eq. 16. V-trace: arXiv 1802.01561, eq. 1, by the kernel that serves environments; here a token is a
step. Tokens with mask 0 (tools, prompts) are skipped: value and advantage pass across them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from unirl.vtrace.advantages import Reduce, over_all
from unirl.vtrace.targets import GAE, VTrace, gae, vtrace_targets
from unirl.vtrace.token_rows import TokenRows, check_tokens, token_rows

WhitenBy: TypeAlias = Literal["variance", "floor", "std"]
"""Where epsilon keeps a division sound: 1 / sqrt(variance + epsilon), 1 / sqrt(max(variance,
epsilon)) or 1 / (std + epsilon)."""


def token_rewards(
    reward: Tensor,
    mask: Tensor,
    sequence: Tensor,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """Rewards of packed tokens, [N]: a completion's reward at its last drawn token, less the
    penalty of each.

    reward: [S]; mask, sequence, penalty (such as a coefficient times a KL estimate): [N].
    """
    rows = token_rows(mask, sequence, reward.numel())
    packed = rows.pack(rows.at_last(reward), mask)
    if penalty is not None:
        check_tokens(mask, sequence, reward.numel(), penalty=penalty)
        packed = packed - torch.where(mask != 0, penalty.detach(), 0.0)
    return packed


def token_returns(
    reward: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int, *, discount: float = 1.0
) -> Tensor:
    """R_t = r_t + discount R_{t+1} over the drawn tokens of each completion, [N]; 0 elsewhere.

    reward, mask, sequence: [N]. No gradient flows out.
    """
    value = torch.zeros_like(reward)
    return token_gae(
        reward, value, mask, sequence, num_sequences, discount=discount, lambda_=1.0
    ).advantage


def token_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    discount: float = 1.0,
    lambda_: float = 1.0,
    bootstrap: Tensor | None = None,
) -> GAE:
    """Generalised advantages of packed tokens; target and advantage are [N], 0 where mask is 0.

    reward, value, mask, sequence: [N]; value is that of the text before the token. bootstrap: [S],
    the value of what follows a completion that was cut off, 0 for one that ended; None: all
    ended. No gradient flows out.
    """
    check_tokens(mask, sequence, num_sequences, reward=reward, value=value)
    rows = token_rows(mask, sequence, num_sequences)
    values, discounts = _values(rows, value, bootstrap, discount)
    with torch.no_grad():
        found = gae(discounts, rows.spread(reward), values, mask=rows.mask, lambda_=lambda_)
        return GAE(rows.pack(found.target, mask), rows.pack(found.advantage, mask))


def token_vtrace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    discount: float = 1.0,
    lambda_: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    bootstrap: Tensor | None = None,
) -> VTrace:
    """V-trace of packed tokens; target and advantage are [N], 0 where mask is 0.

    log_rho: [N], log of the policy's probability of a token over that of the engine that drew it.
    value: a critic's, or one number per completion, such as `group_baseline`, for all its tokens.
    The rest as `token_gae`. The advantage carries its own clipped ratio: no other correction is
    due. No gradient flows out.
    """
    check_tokens(mask, sequence, num_sequences, log_rho=log_rho, reward=reward, value=value)
    rows = token_rows(mask, sequence, num_sequences)
    values, discounts = _values(rows, value, bootstrap, discount)
    found = vtrace_targets(
        rows.spread(log_rho.detach().to(value.dtype)),
        discounts,
        rows.spread(reward),
        values,
        mask=rows.mask,
        rho_clip=rho_clip,
        c_clip=c_clip,
        lambda_=lambda_,
    )
    return VTrace(rows.pack(found.target, mask), rows.pack(found.advantage, mask))


def whiten_tokens(
    advantage: Tensor,
    mask: Tensor,
    *,
    by: WhitenBy = "variance",
    epsilon: float = 1e-8,
    unbiased: bool = True,
    reduce: Reduce | None = None,
) -> Tensor:
    """Advantages centred and scaled to unit size over the tokens of mask; 0 elsewhere. All [N].

    reduce: where these tokens are a part of the batch; None: they are all of it. No gradient flows
    out.
    """
    with torch.no_grad():
        rows = mask != 0
        values = torch.where(rows, advantage, 0.0).double()
        total, count = over_all(reduce, values.sum(), rows.sum().double())
        centred = torch.where(rows, values - total / count.clamp(min=1), 0.0)
        (squares,) = over_all(reduce, centred.square().sum())
        variance = squares / (count - int(unbiased)).clamp(min=1)
        if by == "variance":
            size = (variance + epsilon).sqrt()
        elif by == "floor":
            size = variance.clamp(min=epsilon).sqrt()
        else:
            size = variance.sqrt() + epsilon
        return (centred / size).to(advantage.dtype)


def _values(
    rows: TokenRows, value: Tensor, bootstrap: Tensor | None, discount: float
) -> tuple[Tensor, Tensor]:
    """Values [T+1, S] with the bootstrap in the row after the last token, and discounts [T, S]."""
    spread = rows.spread(value.detach())
    values = torch.cat([spread, torch.zeros_like(spread[:1])])
    discounts = torch.full_like(spread, discount)
    if bootstrap is None:
        last = rows.at_last(torch.ones_like(rows.num_drawn)) != 0
        discounts = discounts.masked_fill(last, 0.0)
    else:
        column = torch.arange(rows.num_drawn.numel(), device=value.device)
        values[rows.num_drawn, column] = bootstrap.detach().to(values.dtype)
    return values, discounts
