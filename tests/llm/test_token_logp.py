"""The chunked log-probabilities against log_softmax of all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.errors import UniRLError
from unirl.llm.training.token_logp import token_logp


def data(
    dtype: torch.dtype = torch.float64, num: int = 13, vocabulary: int = 37
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    target = torch.randint(vocabulary, (num,), generator=generator)
    one, two, three = (t.to(dtype).requires_grad_() for t in (hidden, weight, bias))
    return one, two, three, target


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


SIZES: dict[str, dict[str, Any]] = {
    "kept": {},
    "one chunk": {"keep_bytes": 0},
    "five rows": {"keep_bytes": 0, "chunk_bytes": 5 * 37 * 8},
    "row by row": {"keep_bytes": 0, "chunk_bytes": 1},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_log_probabilities_entropies_and_their_gradients_are_those_of_log_softmax(
    sizes: dict[str, Any], temperature: float, with_bias: bool
) -> None:
    hidden, weight, bias, target = data()
    given = [hidden, weight, bias] if with_bias else [hidden, weight]
    found = token_logp(
        hidden,
        weight,
        target,
        bias=bias if with_bias else None,
        temperature=temperature,
        want_entropy=True,
        **sizes,
    )
    logp, entropy = whole(hidden, weight, bias if with_bias else None, target, temperature)
    assert found.entropy is not None
    torch.testing.assert_close(found.logp, logp, rtol=0, atol=1e-13)
    torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=1e-13)
    a, b = torch.randn(2, len(target), dtype=torch.float64)
    expected = torch.autograd.grad((a * logp + b * entropy).sum(), given)
    got = torch.autograd.grad((a * found.logp + b * found.entropy).sum(), given)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 2**20])
def test_its_gradient_is_the_slope(want_entropy: bool, keep_bytes: int) -> None:
    hidden, weight, bias, target = data(num=4, vocabulary=5)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = token_logp(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=0.7,
            want_entropy=want_entropy,
            keep_bytes=keep_bytes,
            chunk_bytes=3 * 5 * 8,
        )
        return found.logp if found.entropy is None else found.logp + 2 * found.entropy

    # A second backward computes again what the first one used up: equal but for rounding.
    assert torch.autograd.gradcheck(function, (hidden, weight, bias), nondet_tol=1e-12)


def test_strips_smaller_than_a_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, target = data()
    one = token_logp(hidden, weight, target, want_entropy=True)
    expected = torch.autograd.grad((one.logp + one.entropy).sum(), [hidden, weight])
    monkeypatch.setattr("unirl.llm.training.token_logp._CACHE_ELEMENTS", 3 * 37)
    two = token_logp(hidden, weight, target, want_entropy=True)
    got = torch.autograd.grad((two.logp + two.entropy).sum(), [hidden, weight])
    for left, right in zip((*two, *got), (*one, *expected), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-14)


def test_bfloat16_is_as_near_to_float32_as_its_logits_allow() -> None:
    hidden, weight, _, target = data(torch.bfloat16, num=64, vocabulary=512)
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    for chunk_bytes in (1, 2**20):
        found = token_logp(hidden, weight, target, chunk_bytes=chunk_bytes, keep_bytes=0)
        right = token_logp(*exact, target)
        assert found.logp.dtype == torch.float32
        # Logits here are below 16: bfloat16 rounds them by up to 1/32.
        assert (found.logp - right.logp).abs().max() < 0.1
        got = torch.autograd.grad(found.logp.sum(), [hidden, weight])
        expected = torch.autograd.grad(right.logp.sum(), exact)
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == torch.bfloat16
            assert (one - other).norm() < 0.02 * other.norm()


def test_a_second_backward_finds_the_same_gradient() -> None:
    hidden, weight, _, target = data()
    total = token_logp(hidden, weight, target).logp.sum()
    one = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
    two = torch.autograd.grad(total, [hidden, weight])
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-14)


def test_frozen_weights_get_no_gradient() -> None:
    hidden, weight, _, target = data()
    token_logp(hidden, weight.detach(), target).logp.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_token_has_no_log_probability_and_gradient_zero() -> None:
    hidden, weight, _, _ = data()
    found = token_logp(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), want_entropy=True)
    assert found.logp.shape == found.entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(found.logp.sum(), [weight])
    assert not gradient.any()


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, _, target = data(torch.float32)
    found = token_logp(hidden * 1000, weight, target, want_entropy=True)
    assert found.logp.isfinite().all() and found.entropy.isfinite().all()
    assert torch.autograd.grad(found.logp.sum(), hidden)[0].isfinite().all()


def test_wrong_input_is_refused() -> None:
    hidden, weight, bias, target = data()
    with pytest.raises(UniRLError, match="temperature 0"):
        token_logp(hidden, weight, target, temperature=0)
    with pytest.raises(ValueError, match="hidden"):
        token_logp(hidden[:, :3], weight, target)
    with pytest.raises(ValueError, match="target"):
        token_logp(hidden, weight, target[:3])
    with pytest.raises(ValueError, match="int64"):
        token_logp(hidden, weight, target.int())
    with pytest.raises(ValueError, match="bias"):
        token_logp(hidden, weight, target, bias=bias[:3])
    with pytest.raises(ValueError, match="must agree"):
        token_logp(hidden, weight.float(), target)
