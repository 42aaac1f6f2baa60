"""From the rewards of a batch to the advantages of its tokens, as one algorithm has it.

The formulas and their sources are in unirl.vtrace.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from unirl.llm.algorithms.terms import Algorithm
from unirl.llm.algorithms.turn_credit import TurnCredit, Turns, turn_advantages
from unirl.vtrace import (
    GAE,
    Reduce,
    VTrace,
    group_advantages,
    group_baseline,
    token_gae,
    token_kl,
    token_returns,
    token_rewards,
    token_vtrace,
    whiten_tokens,
)

T = TypeVar("T")


class Advantages(NamedTuple):
    """Per token, [N], 0 where mask is 0; per completion, [S]."""

    token: Tensor
    target: Tensor | None
    """What the critic's values are to become, [N]; None without a critic."""
    active: Tensor
    """[S], True where any token has an advantage: see `Algorithm.skips_zero_advantage`."""
    kl: Tensor | None = None
    """The KL estimates that the rewards paid for, [N], without their coefficient; None: none."""


def advantages(
    algorithm: Algorithm,
    reward: Tensor,
    group: Tensor,
    valid: Tensor,
    mask: Tensor,
    sequence: Tensor,
    *,
    old_logp: Tensor | None = None,
    logp: Tensor | None = None,
    reference: Tensor | None = None,
    value: Tensor | None = None,
    bootstrap: Tensor | None = None,
    reduce: Reduce | None = None,
    credit: TurnCredit | None = None,
    turns: Turns | None = None,
) -> Advantages:
    """Advantages of a whole batch, before it is split into micro-batches.

    reward, group (ids, int64), valid (0 where the reward failed), bootstrap (a critic's value of
    what follows; 0 where the text ended): [S]. The others [N]: old_logp (the learner's), logp (the
    engine's; for vtrace), reference (for KL in the reward), value (with a critic). Give rewards as
    `shaped_reward` has them. reduce: where one process has only some groups of the batch.
    Raises ValueError when something is missing that the algorithm needs.

    A completion without a reward has advantage 0 and no part in statistics. Its tokens count in
    denominators unless their mask is cleared. credit: what the step rewards of `turns` are worth,
    beside the reward or instead of it; with a critic, or V-trace, they are rewards of tokens.
    """
    alone = credit is not None and credit.kind == "turn"
    if alone:
        reward = torch.zeros_like(reward)
    drawn = (mask != 0) & (valid != 0)[sequence]
    rewards = torch.where(valid != 0, reward, 0.0)
    kl = _reward_kl(algorithm, old_logp, reference, drawn, sequence)
    penalty = None if kl is None else algorithm.kl_coef * kl
    target = None
    if algorithm.advantage == "group":
        score = group_advantages(
            reward,
            group,
            valid,
            baseline=algorithm.baseline,
            scale=algorithm.scale,
            epsilon=algorithm.epsilon,
            singleton=algorithm.singleton,
            reduce=reduce,
        )
        if penalty is None and algorithm.discount == 1.0:
            token = torch.where(drawn, score[sequence], 0.0)
        else:
            paid = token_rewards(score, drawn, sequence, penalty=penalty)
            token = token_returns(
                paid, drawn, sequence, reward.numel(), discount=algorithm.discount
            )
        if credit is not None:
            steps = turn_advantages(algorithm, credit, given("turns", turns), valid, reduce=reduce)
            share = 1.0 if alone else credit.weight
            token = token + torch.where(drawn, share * steps.to(token.dtype), 0.0)
    else:
        paid = token_rewards(rewards, drawn, sequence, penalty=penalty)
        if credit is not None:
            paid = paid + torch.where(drawn, given("turns", turns).paid.to(paid.dtype), 0.0)
        if algorithm.needs_critic:
            known = given("value", value).detach().to(paid.dtype)
        else:
            mean = group_baseline(reward, group, valid, leave_one_out=True)
            known = mean[sequence]
        ahead = given("bootstrap", bootstrap) if algorithm.bootstraps else None
        tokens = (drawn, sequence, reward.numel())
        traced = _traced(algorithm, tokens, paid, known, ahead, old_logp, logp)
        token = traced.advantage
        target = traced.target if algorithm.needs_critic else None
    if algorithm.whiten != "none":
        token = whiten_tokens(
            token,
            drawn,
            by=algorithm.whiten,
            epsilon=algorithm.whiten_epsilon,
            unbiased=algorithm.whiten_unbiased,
            reduce=reduce,
        )
    moved = (token != 0).to(torch.int64)
    active = torch.zeros_like(group, dtype=torch.int64).index_add_(0, sequence, moved) > 0
    return Advantages(token, target, active, kl)


def _traced(
    algorithm: Algorithm,
    tokens: tuple[Tensor, Tensor, int],
    reward: Tensor,
    value: Tensor,
    bootstrap: Tensor | None,
    old_logp: Tensor | None,
    logp: Tensor | None,
) -> GAE | VTrace:
    """tokens: which were drawn, the completion of each, and how many completions there are."""
    discount, lambda_ = algorithm.discount, algorithm.gae_lambda
    if algorithm.advantage == "gae":
        return token_gae(
            reward, value, *tokens, discount=discount, lambda_=lambda_, bootstrap=bootstrap
        )
    return token_vtrace(
        given("old_logp", old_logp) - given("logp", logp),
        reward,
        value,
        *tokens,
        discount=discount,
        lambda_=lambda_,
        rho_clip=algorithm.rho_clip,
        c_clip=algorithm.c_clip,
        bootstrap=bootstrap,
    )


def _reward_kl(
    algorithm: Algorithm,
    old_logp: Tensor | None,
    reference: Tensor | None,
    drawn: Tensor,
    sequence: Tensor,
) -> Tensor | None:
    """The estimate of each token where KL is in the reward, [N]; None where it is not."""
    if not algorithm.kl_coef or algorithm.kl_in != "reward":
        return None
    with torch.no_grad():
        return token_kl(
            given("old_logp", old_logp),
            given("reference", reference),
            drawn,
            sequence,
            estimate=algorithm.kl,
            clamp=algorithm.kl_clamp,
        )


def shaped_reward(
    algorithm: Algorithm, reward: Tensor, sequence: Tensor, max_tokens: int
) -> Tensor:
    """Rewards [S] with `overlong_penalty`. sequence: [N], of all tokens that a completion consists
    of: those that tools wrote make it long as well.
    """
    length = torch.bincount(sequence, minlength=reward.numel())
    return reward + overlong_penalty(algorithm, length, max_tokens)


def overlong_penalty(algorithm: Algorithm, length: Tensor, max_tokens: int) -> Tensor:
    """What is added to the reward of completions of these lengths, [S], never positive (DAPO, arXiv
    2503.14476, eq. 13).
    """
    buffer = algorithm.overlong_share * max_tokens
    if not buffer:
        return torch.zeros_like(length, dtype=torch.float32)
    beyond = (length.float() - (max_tokens - buffer)).clamp(min=0)
    if algorithm.overlong_capped:
        beyond = beyond.clamp(max=buffer)
    return -algorithm.overlong_factor * beyond / buffer


def given(name: str, value: T | None) -> T:
    if value is None:
        raise ValueError(f"{name} is missing, but the algorithm needs it.")
    return value
