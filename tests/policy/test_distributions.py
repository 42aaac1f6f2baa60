"""Distributions against torch.distributions, and samples against their own probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from unirl.policy.distributions import PADDED_LOGIT, Categorical, DiagGaussian, MultiCategorical


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded(logits: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = logits.split(sizes, -1)
    width = max(sizes)
    pad = torch.nn.functional.pad
    return torch.stack([pad(p, (0, width - p.shape[-1]), value=PADDED_LOGIT) for p in parts], -2)


def test_categorical_is_torch_distributions_categorical() -> None:
    logits, other = torch.randn(2, 7, 3, 5, generator=generator()) * 4
    ours, theirs = Categorical(logits), reference.Categorical(logits=logits)
    action = theirs.probs.argsort(-1)[..., 2]
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.mode(), theirs.mode)
    kl = reference.kl_divergence(theirs, reference.Categorical(logits=other))
    torch.testing.assert_close(ours.kl(Categorical(other)), kl)


def test_multi_categorical_is_the_sum_of_choices_of_different_size() -> None:
    sizes = (2, 5, 3)
    logits, other = torch.randn(2, 4, 6, sum(sizes), generator=generator()) * 3
    ours, second = MultiCategorical(padded(logits, sizes)), MultiCategorical(padded(other, sizes))
    theirs = [reference.Categorical(logits=part) for part in logits.split(sizes, -1)]
    others = [reference.Categorical(logits=part) for part in other.split(sizes, -1)]
    action = ours.sample(generator())
    logp = sum(d.log_prob(action[..., i]) for i, d in enumerate(theirs))
    torch.testing.assert_close(ours.log_prob(action), logp)
    torch.testing.assert_close(ours.entropy(), sum(d.entropy() for d in theirs))
    torch.testing.assert_close(ours.mode(), torch.stack([d.mode for d in theirs], -1))
    kl = sum(reference.kl_divergence(a, b) for a, b in zip(theirs, others, strict=True))
    torch.testing.assert_close(ours.kl(second), kl)


@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_diag_gaussian_is_independent_normals(shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    mean, other_mean = torch.randn(2, 5, 4, size, generator=generator())
    log_std, other_log_std = torch.randn(2, size, generator=generator(1))
    ours = DiagGaussian(mean, log_std, shape)
    second = DiagGaussian(other_mean, other_log_std, shape)
    theirs = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    others = reference.Independent(reference.Normal(other_mean, other_log_std.exp()), 1)
    action = ours.sample(generator())
    assert action.shape == (5, 4, *shape)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action.reshape(5, 4, size)))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.mode(), mean.reshape(5, 4, *shape))
    torch.testing.assert_close(ours.kl(second), reference.kl_divergence(theirs, others))


def test_gradients_are_those_of_torch_distributions() -> None:
    logits = torch.randn(6, 4, generator=generator(), requires_grad=True)
    action = torch.tensor([0, 1, 2, 3, 0, 1])
    ours, theirs = Categorical(logits), reference.Categorical(logits=logits)
    (grad,) = torch.autograd.grad((ours.log_prob(action) + ours.entropy()).sum(), logits)
    (expected,) = torch.autograd.grad((theirs.log_prob(action) + theirs.entropy()).sum(), logits)
    torch.testing.assert_close(grad, expected)


def test_padding_gets_no_gradient_and_makes_no_nan() -> None:
    logits = torch.randn(3, 2, 4, generator=generator())
    logits[:, 0, 2:] = PADDED_LOGIT
    logits.requires_grad_()
    policy = MultiCategorical(logits)
    action = torch.zeros(3, 2, dtype=torch.int64)
    loss = policy.log_prob(action) + policy.entropy() + policy.kl(MultiCategorical(logits * 1.0))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.isfinite(grad).all()
    assert (grad[:, 0, 2:] == 0).all()


def test_categorical_samples_have_the_frequencies_of_their_probabilities() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.049, 0.001])
    num_samples = 200_000
    action = Categorical(probs.log().expand(num_samples, 5)).sample(generator())
    counts = torch.bincount(action, minlength=5).double()
    expected = probs.double() * num_samples
    # Chi-squared with 4 degrees of freedom exceeds 18.5 once in a thousand.
    assert ((counts - expected).square() / expected).sum() < 18.5


def test_padded_and_impossible_actions_are_never_sampled() -> None:
    logits = torch.tensor([0.0, PADDED_LOGIT, 0.0, -torch.inf]).expand(100_000, 4)
    action = Categorical(logits).sample(generator())
    assert sorted(action.unique().tolist()) == [0, 2]


def test_gaussian_samples_have_the_mean_and_std_of_their_parameters() -> None:
    mean, std = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    action = DiagGaussian(mean.expand(200_000, 2), std.log(), (2,)).sample(generator())
    torch.testing.assert_close(action.mean(0), mean, atol=0.03, rtol=0)
    torch.testing.assert_close(action.std(0), std, atol=0.03, rtol=0)


@pytest.mark.parametrize("name", ["categorical", "multi", "gaussian"])
def test_the_generator_decides_what_is_sampled(name: str) -> None:
    x = torch.randn(9, 4, 3, generator=generator())
    policy = {
        "categorical": Categorical(x[:, 0]),
        "multi": MultiCategorical(x),
        "gaussian": DiagGaussian(x[:, 0], torch.zeros(3), (3,)),
    }[name]
    action = policy.sample(generator(5))
    assert torch.equal(action, policy.sample(generator(5)))
    assert not torch.equal(action, policy.sample(generator(6)))


@pytest.mark.parametrize("name", ["categorical", "multi", "gaussian"])
def test_rows_are_selected_like_those_of_a_tensor(name: str) -> None:
    x = torch.randn(5, 2, 4, 3, generator=generator())
    policy = {
        "categorical": Categorical(x[:, :, 0]),
        "multi": MultiCategorical(x),
        "gaussian": DiagGaussian(x[:, :, 0], torch.zeros(3), (3,)),
    }[name]
    action = policy.sample(generator())
    part = policy[:-1]
    assert torch.equal(part.log_prob(action[:-1]), policy.log_prob(action)[:-1])
    assert torch.equal(part.entropy(), policy.entropy()[:-1])
    assert torch.equal(part.mode(), policy.mode()[:-1])


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(4, 3, generator=generator()).bfloat16()
    policy = Categorical(logits)
    assert policy.entropy().dtype == torch.float32
    assert torch.equal(policy.all_logp, torch.log_softmax(logits.float(), -1))
