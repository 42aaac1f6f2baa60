"""Tokens are drawn from the distribution they are said to be drawn from."""

import numpy as np
import pytest
import torch

from unirl.llm.engines.decoding import draw, seed_keys, uniforms


def _uniform(rows: int, seed: int = 0) -> torch.Tensor:
    keys = seed_keys(np.arange(rows, dtype=np.uint64) + np.uint64(seed * rows))
    return torch.from_numpy(uniforms(keys, np.zeros(rows, np.int64)))


def _chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    used = expected > 0
    assert not counts[~used].any()
    return float(((counts - expected)[used] ** 2 / expected[used]).sum())


@pytest.mark.parametrize("by", ["seed", "index"])
def test_uniform_numbers_are_uniform_over_seeds_and_over_indices(by: str) -> None:
    many = np.arange(40_000)
    if by == "seed":
        drawn = uniforms(seed_keys(many.astype(np.uint64)), np.full(len(many), 3))
    else:
        drawn = uniforms(seed_keys(np.full(len(many), 3, np.uint64)), many)
    counts = np.bincount((drawn * 50).astype(int), minlength=50)
    assert len(counts) == 50
    # 49 degrees of freedom: 99.9 % of fair draws stay below 85.4.
    assert ((counts - 800) ** 2 / 800).sum() < 85.4
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.02


def test_uniform_numbers_depend_on_seed_and_index_alone() -> None:
    keys = seed_keys(np.array([7, 8, 7], np.uint64))
    drawn = uniforms(keys, np.array([5, 5, 5]))
    assert drawn[0] == drawn[2] != drawn[1]
    assert uniforms(keys[1:2], np.array([5]))[0] == drawn[1]


@pytest.mark.parametrize("size", [6, 1500, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_drawn_tokens_follow_the_softmax(size: int, temperature: float) -> None:
    logits = torch.full((size,), -40.0)
    places = torch.linspace(0, size - 1, 6).long()
    logits[places] = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0])
    rows = 8000
    settings = torch.full((rows,), temperature, dtype=torch.float64)
    token, logp = draw(logits.expand(rows, -1), _uniform(rows), temperature=settings)
    expected = (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(token, minlength=size).double()
    # 5 degrees of freedom: 99.9 % stay below 20.5.
    assert _chi_square(counts[places], rows * expected[places]) < 20.5
    torch.testing.assert_close(logp.double(), expected[token].log(), atol=1e-6, rtol=0)


def test_top_k_draws_from_the_likeliest_only_and_renormalises() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
    rows = 4000
    token, logp = draw(
        logits.expand(rows, -1), _uniform(rows), top_k=torch.full((rows,), 2, dtype=torch.int64)
    )
    expected = torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0]).masked_fill(
        torch.tensor([1, 0, 1, 0, 1]).bool(), float("-inf")
    )
    probability = expected.double().softmax(-1)
    assert _chi_square(torch.bincount(token, minlength=5).double(), rows * probability) < 10.8
    torch.testing.assert_close(logp.double(), probability[token].log(), atol=1e-6, rtol=0)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probability = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05], dtype=torch.float64)
    rows = 2000
    for top_p, kept in ((0.5, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.85, [0, 1, 3])):
        token, logp = draw(
            probability.log().expand(rows, -1),
            _uniform(rows),
            top_p=torch.full((rows,), top_p, dtype=torch.float64),
        )
        assert sorted(set(token.tolist())) == kept
        left = probability[kept].sum()
        torch.testing.assert_close(logp, (probability[token] / left).log())


def test_rows_of_different_settings_do_not_touch_each_other() -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniform = _uniform(5)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0, 1.0], dtype=torch.float64)
    top_k = torch.tensor([0, 0, 10, 3, 0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.3], dtype=torch.float64)
    token, logp = draw(logits, uniform, temperature=temperature, top_k=top_k, top_p=top_p)
    for row in range(5):
        one = slice(row, row + 1)
        alone = draw(
            logits[one],
            uniform[one],
            temperature=temperature[one],
            top_k=top_k[one],
            top_p=top_p[one],
        )
        assert alone[0] == token[row]
        torch.testing.assert_close(alone[1][0], logp[row], atol=1e-12, rtol=0)
    plain = draw(logits[:1], uniform[:1])
    assert plain[0] == token[0]
    torch.testing.assert_close(plain[1][0], logp[0], atol=1e-12, rtol=0)


def test_temperature_zero_takes_the_likeliest_and_says_it_was_certain() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [3.0, 2.0, 1.0]])
    token, logp = draw(logits, _uniform(2), temperature=torch.zeros(2, dtype=torch.float64))
    assert token.tolist() == [1, 0]
    assert logp.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("size", [5, 2000])
def test_the_extremes_of_the_uniform_number_never_draw_the_impossible(size: int) -> None:
    logits = torch.full((2, size), float("-inf"))
    logits[:, 2] = logits[:, 3] = 0.0
    uniform = torch.tensor([0.0, (2**52 - 1) / 2**52], dtype=torch.float64)
    assert draw(logits, uniform)[0].tolist() == [2, 3]
