"""Claims about losses: micro-batches add up, masked rows are inert, shapes never broadcast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unirl.vtrace import Loss, entropy_loss, policy_gradient_loss, value_loss

losses: dict[str, Callable[[Tensor, Tensor, Tensor], Loss]] = {
    "policy": policy_gradient_loss,
    "value": value_loss,
    "entropy": lambda entropy, _, mask: entropy_loss(entropy, mask),
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
