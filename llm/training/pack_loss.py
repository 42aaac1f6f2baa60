"""The loss of one pack of tokens: the policy's, and what an algorithm adds to it. The formulas and
their sources are in unirl.vtrace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unirl.llm.algorithms.algorithm import aggregated, critic_loss, kl_loss, policy_terms
from unirl.llm.algorithms.terms import Algorithm
from unirl.llm.training.language_policy import TokenTerms
from unirl.llm.training.packing import Pack
from unirl.vtrace import TokenMetrics
from unirl.vtrace.token_corrections import MAX_LOG_WEIGHT


@dataclass(frozen=True)
class Known:
    """What is known of a batch before its first step: [N] each but train, on the policy's device;
    None: not needed.
    """

    advantage: Tensor
    train: Tensor
    """[S]: which completions have a gradient; on the host."""
    drawn: Tensor
    """The engine's log-probabilities."""
    target: Tensor | None = None
    """What the critic's values are to become."""
    old_logp: Tensor | None = None
    """The learner's log-probabilities before the batch; None: its forward pass finds them again."""
    old_value: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    """Of a model that the policy is to imitate."""


class PackLoss(NamedTuple):
    """loss: a sum, to be divided by the denominator of the whole step."""

    loss: Tensor
    sums: Tensor
    """What is reported of it, by SUMS: float64. On the device still, as are the metrics: reading
    them here would wait before the backward pass is even begun.
    """
    metrics: TokenMetrics


SUMS = ("policy", "kl", "entropy", "value", "apart")
"""apart: log-probability less the teacher's."""


def pack_loss(
    algorithm: Algorithm,
    terms: TokenTerms,
    pack: Pack,
    known: Known,
    size: int,
    *,
    teacher_coef: float = 0.0,
) -> PackLoss:
    """size: completions in the batch."""
    mask, sequence = torch.ones_like(pack.target, dtype=torch.bool), pack.sequence
    sums = dict.fromkeys(SUMS, terms.logp.new_zeros((), dtype=torch.float64))

    def of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[pack.flat]

    old, logp, gain = of(known.old_logp), known.drawn[pack.flat], known.advantage[pack.flat]
    if known.teacher is not None:
        before = terms.logp.detach() if old is None else old
        apart = before - known.teacher[pack.flat]
        pull = teacher_coef * apart
        if algorithm.advantage == "vtrace":
            # As V-trace's own advantage carries its ratio: no other correction follows.
            ratio = (before - logp).clamp(max=MAX_LOG_WEIGHT).exp()
            pull = pull * ratio.clamp(max=algorithm.rho_clip)
        gain = gain - pull
        sums["apart"] = apart.sum()
    policy = policy_terms(algorithm, terms.logp, old, logp, gain, mask, sequence, size)
    loss = policy.loss.numerator
    sums["policy"] = loss
    if algorithm.kl_coef and algorithm.kl_in == "loss":
        other = of(known.reference)
        kl = kl_loss(
            algorithm, terms.logp, logp, other, mask, sequence, size, old_logp=old
        ).numerator
        loss = loss + algorithm.kl_coef * kl
        sums["kl"] = kl
    if terms.entropy is not None:
        entropy = aggregated(algorithm, terms.entropy, mask, sequence, size).numerator
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * entropy
        sums["entropy"] = entropy
    old_value = of(known.old_value)
    if terms.value is not None and known.target is not None and old_value is not None:
        target = known.target[pack.flat]
        value = critic_loss(
            algorithm, terms.value, old_value, target, mask, sequence, size
        ).numerator
        loss = loss + algorithm.value_coef * value
        sums["value"] = value
    stacked = torch.stack([each.detach().double() for each in sums.values()])
    return PackLoss(loss, stacked, policy.metrics)
