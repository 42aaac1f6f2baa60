"""Two algorithms side by side on one batch: which terms differ, and by how much."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unirl.llm.algorithms.advantages import advantages, shaped_reward
from unirl.llm.algorithms.algorithm import denominator, kl_loss, policy_terms
from unirl.llm.algorithms.batch_file import SavedBatch
from unirl.llm.algorithms.effect import rules_of
from unirl.llm.algorithms.terms import Algorithm


class Outcome(NamedTuple):
    """The loss of one algorithm, and its gradient with respect to new_logp, [N]."""

    loss: float
    gradient: Tensor


class Difference(NamedTuple):
    first: Outcome
    second: Outcome
    cosine: float
    """Of the angle between the gradients; 1: they point the same way."""
    factor: float
    """How many times longer the second's gradient is."""
    largest: float
    """Largest difference of one token's gradient."""


def outcome(algorithm: Algorithm, batch: SavedBatch) -> Outcome:
    """Loss and gradient: policy and KL; without critic and entropy, whose gradients go elsewhere.

    A completion without a reward is left out, as learners do; none counts as cut off.
    """
    mask = batch.mask & batch.valid[batch.sequence]
    shaped = shaped_reward(algorithm, batch.reward, batch.sequence, batch.max_tokens)
    advantage = advantages(
        algorithm,
        shaped,
        batch.group,
        batch.valid,
        mask,
        batch.sequence,
        old_logp=batch.old_logp,
        logp=batch.logp,
        reference=batch.reference,
        value=batch.value.to(shaped.dtype),
        bootstrap=torch.zeros_like(shaped),
    ).token
    new = batch.new_logp.detach().requires_grad_()
    where = (mask, batch.sequence, batch.num_sequences)
    total = denominator(algorithm, *where)
    policy = policy_terms(algorithm, new, batch.old_logp, batch.logp, advantage, *where)
    loss = policy.loss.numerator
    if algorithm.kl_coef and algorithm.kl_in == "loss":
        old = batch.old_logp
        kl = kl_loss(algorithm, new, batch.logp, batch.reference, *where, old_logp=old)
        loss = loss + algorithm.kl_coef * kl.numerator
    loss = loss / total.clamp(min=1).to(loss.dtype)
    (gradient,) = torch.autograd.grad(loss, new)
    return Outcome(float(loss.detach()), gradient)


def difference(first: Algorithm, second: Algorithm, batch: SavedBatch) -> Difference:
    one, two = outcome(first, batch), outcome(second, batch)
    a, b = one.gradient.double(), two.gradient.double()
    norms = float(a.norm()), float(b.norm())
    cosine = float(a @ b) / (norms[0] * norms[1]) if all(norms) else float("nan")
    factor = norms[1] / norms[0] if norms[0] else float("inf")
    return Difference(one, two, cosine, factor, float((a - b).abs().max()))


def differing_terms(first: Algorithm, second: Algorithm) -> dict[str, tuple[object, object]]:
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in rules_of(Algorithm)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
