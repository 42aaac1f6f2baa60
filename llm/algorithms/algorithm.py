"""What a learner calls: from rewards to advantages, from log-probabilities to losses.

Packed tokens are [N], with the index of each token's completion; there are S completions. The
formulas and their sources are in unirl.vtrace. In one batch:

    algorithm = resolve(config, max_tokens=...)
    check_group_size(algorithm, group_size)
    reward = shaped_reward(algorithm, reward, sequence, max_tokens)
    found = advantages(algorithm, reward, group, valid, mask, sequence, ...)
    total = the sum of denominator(...) over all micro-batches and processes
    for each micro-batch of whole completions:
        policy = policy_terms(...).loss.numerator
        kl = algorithm.kl_coef * kl_loss(...).numerator        # where kl_in is loss
        ((policy + kl) / total).backward()
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unirl.llm.algorithms.advantages import given
from unirl.llm.algorithms.terms import Algorithm
from unirl.vtrace import (
    Loss,
    TokenMetrics,
    aggregate,
    aggregate_denominator,
    correction_weights,
    token_kl,
    token_metrics,
    token_objective,
)


def denominator(algorithm: Algorithm, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """What these tokens of the batch add to the denominator of every loss: a float64 scalar.

    Add it up over all micro-batches and processes, completions that are skipped included, before
    the first backward(); each numerator is divided by the total.
    """
    return aggregate_denominator(mask, sequence, num_sequences, aggregation=algorithm.aggregation)


def aggregated(
    algorithm: Algorithm, loss: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int
) -> Loss:
    """Any loss per token, [N], as the algorithm aggregates: minus the entropy, say."""
    if algorithm.aggregation == "seq-mean-token-sum-norm" and not algorithm.norm_tokens:
        raise ValueError("norm_tokens is 0: give resolve() the max_tokens of a completion.")
    return aggregate(
        loss,
        mask,
        sequence,
        num_sequences,
        aggregation=algorithm.aggregation,
        norm_tokens=algorithm.norm_tokens or 1,
    )


class PolicyTerms(NamedTuple):
    """The loss of the policy on some tokens of the batch, and what it did there."""

    loss: Loss
    metrics: TokenMetrics


def policy_terms(
    algorithm: Algorithm,
    new_logp: Tensor,
    old_logp: Tensor | None,
    logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
) -> PolicyTerms:
    """The loss of the policy, and its metrics. All [N]; completions are whole.

    old_logp None: this is the only update of the batch, so it is new_logp without gradient.
    """
    old = new_logp.detach() if old_logp is None else old_logp
    found = token_objective(
        new_logp,
        logp if algorithm.ratio == "behaviour" else old,
        advantage,
        mask,
        sequence,
        num_sequences,
        objective=algorithm.objective,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        tau_positive=algorithm.tau_positive,
        tau_negative=algorithm.tau_negative,
        log_ratio_clamp=algorithm.log_ratio_clamp,
    )
    weight = correction_weights(
        old,
        logp,
        mask,
        sequence,
        num_sequences,
        correction=algorithm.correction,
        level=algorithm.correction_level,
        low=algorithm.correction_low,
        high=algorithm.correction_high,
        sequence_mask=algorithm.sequence_mask,
        mask_low=algorithm.mask_low,
        mask_high=algorithm.mask_high,
    )
    loss = aggregated(algorithm, found.loss * weight, mask, sequence, num_sequences)
    metrics = token_metrics(new_logp, old, logp, weight, found.low, found.high, mask, sequence)
    return PolicyTerms(loss, metrics)


def kl_loss(
    algorithm: Algorithm,
    new_logp: Tensor,
    logp: Tensor,
    reference: Tensor | None,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    old_logp: Tensor | None = None,
) -> Loss:
    """The KL estimate as a loss, without its coefficient; all [N], logp the engine's, old_logp as
    `policy_terms` has it. `reference` None only where the algorithm holds the policy to the engine.
    """
    other = logp if algorithm.kl_against == "behaviour" else given("reference", reference)
    kl = token_kl(
        new_logp,
        other,
        mask,
        sequence,
        estimate=algorithm.kl,
        gradient=algorithm.kl_gradient,
        logp=logp,
        old_logp=old_logp,
        clamp=algorithm.kl_clamp,
    )
    return aggregated(algorithm, kl, mask, sequence, num_sequences)


def critic_loss(
    algorithm: Algorithm,
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
) -> Loss:
    """Half the squared error of the critic, clipped where the algorithm says; all [N]."""
    rows = mask != 0
    error = torch.where(rows, value - target.detach(), 0.0)
    square = error.square()
    if algorithm.value_clip:
        start = torch.where(rows, old_value - target, 0.0).detach()
        kept = start + (error - start).clamp(-algorithm.value_clip, algorithm.value_clip)
        square = torch.maximum(square, kept.square())
    return aggregated(algorithm, 0.5 * square, mask, sequence, num_sequences)
