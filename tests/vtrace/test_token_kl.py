"""Claims about KL estimates of packed tokens: values, and which gradient is right."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from tests.vtrace.token_batch import batch, gradient
from unirl.vtrace import (
    KlEstimate,
    token_kl,
)


@pytest.mark.parametrize("estimate", get_args(KlEstimate))
def test_kl_estimates_are_those_of_the_formulas_and_inert_where_masked(
    estimate: KlEstimate,
) -> None:
    one = batch(6)
    new = one.new_logp.requires_grad_()
    found = token_kl(new, one.logp, one.mask, one.sequence, estimate=estimate)
    apart = (new - one.logp).detach()[one.mask]
    want = {"k1": apart, "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}[estimate]
    slope = {"k1": torch.ones_like(apart), "k2": apart, "k3": 1 - (-apart).exp()}[estimate]
    assert torch.allclose(found[one.mask], want, atol=1e-14)
    assert not found[~one.mask].any()
    assert torch.allclose(gradient(found.sum(), new)[one.mask], slope, atol=1e-14)


def test_kl_with_k2s_gradient_keeps_the_value_of_k3() -> None:
    one = batch(7, garbage=False)
    new = one.new_logp.requires_grad_()
    plain = token_kl(new, one.logp, one.mask, one.sequence, estimate="k3")
    found = token_kl(new, one.logp, one.mask, one.sequence, estimate="k3", gradient="k2")
    assert torch.allclose(found, plain)
    want = torch.where(one.mask, new - one.logp, 0.0)
    assert torch.allclose(gradient(found.sum(), new), want.detach())


@pytest.mark.parametrize("gradient_of", ["score", "ratio"])
def test_the_expected_gradient_of_kl_is_right_where_the_draw_is_counted(gradient_of: Any) -> None:
    """Every token of a vocabulary, weighed by its probability: the expectation is exact."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=torch.float64).log()
    new = logits.log_softmax(-1)
    old = new.detach() if gradient_of == "score" else torch.tensor([0.1, 0.5, 0.2, 0.2]).log()
    exact = gradient((new.exp() * (new - reference)).sum(), logits)
    for estimate in get_args(KlEstimate):
        new = logits.log_softmax(-1)
        kl = token_kl(
            new,
            reference,
            torch.ones(4),
            torch.arange(4),
            estimate=estimate,
            gradient=gradient_of,
            logp=old.double(),
        )
        found = gradient((old.double().exp() * kl).sum(), logits)
        if estimate == "k2":  # its value is not the KL's, so neither is this gradient
            assert not torch.allclose(found, exact, atol=1e-3)
        else:
            assert torch.allclose(found, exact, atol=1e-7)


def test_a_token_that_its_drawer_hardly_knew_counts_five_times_and_keeps_its_gradient() -> None:
    new = torch.tensor([-1.0, -1.0], dtype=torch.float64).requires_grad_()
    reference, logp = torch.tensor([-1.5, -1.5]).double(), torch.tensor([-5.0, -2.0]).double()
    kl = token_kl(
        new,
        reference,
        torch.ones(2),
        torch.arange(2),
        estimate="k2",
        gradient="ratio",
        logp=logp,
    )
    value, slope = 0.5**2 / 2, 0.5  # of k2; the ratio adds the value to the slope
    weight = torch.tensor([5.0, math.e]).double()
    assert torch.allclose(kl, weight * value)
    assert torch.allclose(gradient(kl.sum(), new), weight * (slope + value))


def test_of_the_plain_estimates_only_k2_has_the_right_gradient_on_policy() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=torch.float64).log()
    new = logits.log_softmax(-1)
    exact = gradient((new.exp() * (new - reference)).sum(), logits)
    found = {}
    for estimate in get_args(KlEstimate):
        new = logits.log_softmax(-1)
        kl = token_kl(new, reference, torch.ones(4), torch.arange(4), estimate=estimate)
        found[estimate] = gradient((new.detach().exp() * kl).sum(), logits)
    assert torch.allclose(found["k2"], exact)
    assert torch.allclose(found["k1"], torch.zeros(4).double(), atol=1e-15)
    backwards = reference.exp() * (reference - logits.log_softmax(-1))
    assert torch.allclose(found["k3"], gradient(backwards.sum(), logits))


def test_times_the_ratio_to_before_the_update_is_score_at_the_first_step_and_its_own_later() -> (
    None
):
    one = batch(8, garbage=False)
    new = one.new_logp.requires_grad_()
    tokens = (one.logp, one.mask, one.sequence)
    first = token_kl(new, *tokens, gradient="old_ratio")
    score = token_kl(new, *tokens, gradient="score")
    assert torch.allclose(first, score)
    assert torch.allclose(gradient(first.sum(), new), gradient(score.sum(), new))
    old = (one.new_logp + 0.3 * torch.sin(torch.arange(len(new)))).detach()
    later = token_kl(new, *tokens, gradient="old_ratio", old_logp=old)
    now = new.detach()
    for i in range(len(now)):  # the formula, token by token
        d, ratio = float(now[i] - one.logp[i]), math.exp(float(now[i] - old[i]))
        want = ratio * (math.exp(-d) - 1 + d) if one.mask[i] else 0.0
        assert float(later[i]) == pytest.approx(want, rel=1e-9)
    slope = gradient(later.sum(), new)[one.mask]
    d, ratio = (new - one.logp).detach()[one.mask], (new - old).detach().exp()[one.mask]
    assert torch.allclose(slope, ratio * (1 - (-d).exp()) + ratio * ((-d).exp() - 1 + d))
