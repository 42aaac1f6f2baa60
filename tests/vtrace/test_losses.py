"""Claims about losses: micro-batches add up, masked rows are inert, shapes never broadcast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.vtrace.reference import slow_clipped_policy_loss, slow_clipped_value_loss
from unirl.vtrace import (
    Loss,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_loss,
    kl_estimate,
    policy_gradient_loss,
    value_loss,
)

losses: dict[str, Callable[[Tensor, Tensor, Tensor], Loss]] = {
    "policy": policy_gradient_loss,
    "value": value_loss,
    "entropy": lambda entropy, _, mask: entropy_loss(entropy, mask),
    "clipped policy": lambda new_logp, other, mask: clipped_policy_loss(
        new_logp, 0.7 * other, other, mask, clip=0.2
    ),
    "clipped value": lambda value, other, mask: clipped_value_loss(
        value, other, 1.5 * other, mask, clip=0.2
    ),
}
every_loss = pytest.mark.parametrize("loss", losses.values(), ids=losses.keys())


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Prediction (with gradient), its counterpart, and a mask whose columns differ in rows."""
    generator = torch.Generator().manual_seed(0)
    shape = (6, 8)
    prediction = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    other = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) > torch.linspace(0.0, 1.0, 8)
    return prediction, other, mask


def gradient(total: Tensor, prediction: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(total, prediction)
    return result


@every_loss
def test_micro_batches_give_the_gradient_of_the_whole_batch(
    loss: Callable[[Tensor, Tensor, Tensor], Loss],
) -> None:
    prediction, other, mask = batch()
    want = gradient(loss(prediction, other, mask).mean(), prediction)
    num_rows = mask.sum()
    pieces = [slice(0, 3), slice(3, 4), slice(4, 8)]
    got, mean_of_means = torch.zeros_like(want), torch.zeros_like(want)
    for piece in pieces:
        micro = loss(prediction[:, piece], other[:, piece], mask[:, piece])
        got += gradient(micro.numerator / num_rows, prediction)
        micro = loss(prediction[:, piece], other[:, piece], mask[:, piece])
        mean_of_means += gradient(micro.mean() / len(pieces), prediction)
    torch.testing.assert_close(got, want)
    assert (mean_of_means - want).abs().max() > 1e-3  # what numerator and denominator are for


@every_loss
def test_added_losses_have_the_mean_of_the_whole_batch(
    loss: Callable[[Tensor, Tensor, Tensor], Loss],
) -> None:
    prediction, other, mask = batch()
    total = loss(prediction[:, :3], other[:, :3], mask[:, :3]) + loss(
        prediction[:, 3:], other[:, 3:], mask[:, 3:]
    )
    whole = loss(prediction, other, mask)
    torch.testing.assert_close(total.mean(), whole.mean())
    assert total.denominator == whole.denominator == mask.sum()


def test_each_loss_is_its_formula() -> None:
    prediction, other, mask = batch()
    p, o = prediction.detach()[mask], other[mask]
    for loss, want in (
        (policy_gradient_loss(prediction, other, mask), -(p * o).mean()),
        (value_loss(prediction, other, mask), 0.5 * (p - o).square().mean()),
        (entropy_loss(prediction, mask), -p.mean()),
    ):
        torch.testing.assert_close(loss.mean().detach(), want)


@every_loss
def test_masked_rows_pass_neither_number_nor_gradient(
    loss: Callable[[Tensor, Tensor, Tensor], Loss],
) -> None:
    prediction, other, mask = batch()
    want = loss(prediction, other, mask).mean()
    want_gradient = gradient(want, prediction)
    for poison in (torch.nan, torch.inf, -torch.inf):
        bad = torch.where(mask, prediction.detach(), poison).requires_grad_()
        got = loss(bad, torch.where(mask, other, poison), mask).mean()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradient(got, bad), want_gradient)


@every_loss
def test_a_batch_of_fillers_alone_is_zero_with_zero_gradient(
    loss: Callable[[Tensor, Tensor, Tensor], Loss],
) -> None:
    prediction, other, mask = batch()
    mean = loss(prediction, other, torch.zeros_like(mask)).mean()
    assert mean == 0 and not gradient(mean, prediction).any()


def test_targets_and_advantages_receive_no_gradient() -> None:
    prediction, other, mask = batch()
    other.requires_grad_()
    total = value_loss(prediction, other, mask).mean()
    total = total + policy_gradient_loss(prediction, other, mask).mean()
    total = total + clipped_policy_loss(prediction, other, other, mask, clip=0.2).mean()
    total = total + clipped_value_loss(prediction, other, other, mask, clip=0.2).mean()
    got = torch.autograd.grad(total, [prediction, other], allow_unused=True)
    assert got[0] is not None and got[1] is None


def test_the_policy_gradient_makes_good_actions_likelier() -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    new_logp = logits.log_softmax(-1)[:, 0]
    loss = policy_gradient_loss(new_logp, torch.ones(1), torch.ones(1)).mean()
    chosen, other = gradient(loss, logits)[0]
    assert chosen < 0 < other  # descent raises the chosen action's logit


def test_sums_of_bfloat16_count_in_float32() -> None:
    entropy, mask = torch.ones(1001, 1, dtype=torch.bfloat16), torch.ones(1001, 1)
    loss = entropy_loss(entropy, mask)
    assert loss.denominator.item() == 1001 and loss.numerator.item() == -1001


@every_loss
def test_shapes_that_would_broadcast_are_refused(
    loss: Callable[[Tensor, Tensor, Tensor], Loss],
) -> None:
    prediction, other, mask = batch()
    with pytest.raises(ValueError, match=r"\(6, 8, 1\).*\(6, 8\).*Squeeze"):
        loss(prediction[..., None], other, mask)


@given(
    seed=st.integers(0, 2**31), clip=st.sampled_from([0.05, 0.2, 1.0]), scale=st.floats(0.0, 3.0)
)
def test_clipped_losses_equal_their_slow_twins(seed: int, clip: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, moved, other = torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
    old, mask = new + scale * moved, torch.rand(5, 3, generator=generator) > 0.3
    for fast, slow in (
        (clipped_policy_loss, slow_clipped_policy_loss),
        (clipped_value_loss, slow_clipped_value_loss),
    ):
        got, want = fast(new, old, other, mask, clip=clip), slow(new, old, other, mask, clip=clip)
        assert got.numerator.item() == pytest.approx(want[0], rel=1e-12, abs=1e-12)
        assert got.denominator.item() == want[1]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [
        (0.3, 1.0, False),
        (0.3, -1.0, True),
        (-0.3, -1.0, False),
        (-0.3, 1.0, True),
        (0.1, 1.0, True),
    ],
)
def test_a_ratio_outside_the_clip_has_a_gradient_only_back_towards_it(
    log_ratio: float, advantage: float, moves: bool
) -> None:
    new_logp = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    loss = clipped_policy_loss(new_logp, 0 * one, advantage * one, one, clip=0.2)
    slope = gradient(loss.mean(), new_logp).item()
    want = -advantage * torch.tensor(log_ratio, dtype=torch.float64).exp().item() if moves else 0.0
    assert slope == pytest.approx(want)


@pytest.mark.parametrize(
    ("value", "target", "moves"),
    [(1.5, 3.0, False), (1.5, 1.0, True), (0.5, -3.0, False), (1.1, 3.0, True), (1.5, -3.0, True)],
)
def test_a_value_that_moved_by_more_than_the_clip_has_a_gradient_only_back(
    value: float, target: float, moves: bool
) -> None:
    new, one = torch.tensor([value], requires_grad=True), torch.ones(1)
    loss = clipped_value_loss(new, one, target * one, one, clip=0.2).mean()
    assert gradient(loss, new).item() == pytest.approx(value - target if moves else 0.0)


def test_where_the_policies_agree_the_clipped_gradient_is_the_policy_gradient() -> None:
    new_logp, advantage, mask = batch()
    want = gradient(policy_gradient_loss(new_logp, advantage, mask).mean(), new_logp)
    loss = clipped_policy_loss(new_logp, new_logp.detach(), advantage, mask, clip=0.2)
    torch.testing.assert_close(gradient(loss.mean(), new_logp), want)


def test_a_ratio_too_large_for_floats_stays_finite() -> None:
    new_logp = torch.full((2, 1), 1000.0, requires_grad=True)
    zero, advantage = torch.zeros(2, 1), torch.tensor([[1.0], [-1.0]])
    loss = clipped_policy_loss(new_logp, zero, advantage, torch.ones(2, 1), clip=0.2).mean()
    assert loss.isfinite() and gradient(loss, new_logp).isfinite().all()
    assert kl_estimate(new_logp, zero, torch.ones(2, 1)).mean().isfinite()


def test_the_kl_estimate_has_the_mean_of_the_divergence_and_ignores_masked_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 5, generator=generator).mul(0.5).log_softmax(-1)
    want = (old.exp() * (old - new)).sum()
    action = torch.multinomial(old.exp(), 200_000, replacement=True, generator=generator)
    mask = torch.arange(200_000) % 3 != 0
    new_logp = torch.where(mask, new[action], torch.nan).requires_grad_()
    estimate = kl_estimate(new_logp, old[action], mask)
    assert estimate.mean().item() == pytest.approx(want.item(), rel=0.02)
    assert not estimate.numerator.requires_grad and estimate.denominator == mask.sum()
