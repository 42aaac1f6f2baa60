"""Claims about the metrics of packed tokens: parts add up, and say what happened."""

from __future__ import annotations

import pytest
import torch

from tests.vtrace.token_batch import Batch, batch, take
from unirl.vtrace import (
    TokenMetrics,
    correction_weights,
    token_metrics,
    token_objective,
)


def metrics_of(one: Batch) -> TokenMetrics:
    objective = token_objective(
        one.new_logp, one.old_logp, one.advantage, one.mask, one.sequence, one.num
    )
    weight = correction_weights(one.old_logp, one.logp, one.mask, one.sequence, one.num, high=1.2)
    return token_metrics(
        one.new_logp,
        one.old_logp,
        one.logp,
        weight,
        objective.low,
        objective.high,
        one.mask,
        one.sequence,
    )


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    one = batch(12)
    parts = [take(one, (one.sequence % 3 == rest).nonzero().squeeze(1)) for rest in range(3)]
    total = metrics_of(parts[0]) + metrics_of(parts[1]) + metrics_of(parts[2])
    assert total.values() == pytest.approx(metrics_of(one).values())


def test_metrics_say_what_happened() -> None:
    one = batch(13)
    rows = one.mask
    found = metrics_of(one).values()
    ratio = (one.new_logp - one.old_logp)[rows].exp()
    weight = (one.old_logp - one.logp)[rows].exp().clamp(max=1.2)
    mismatch = (one.old_logp - one.logp)[rows].abs()
    low = (ratio < 0.8) & (one.advantage[rows] < 0)
    high = (ratio > 1.2) & (one.advantage[rows] > 0)
    assert found["clip_ratio/low_mean"] == pytest.approx(float(low.double().mean()))
    assert found["clip_ratio/high_mean"] == pytest.approx(float(high.double().mean()))
    assert found["losses/approx_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()))
    assert found["sampling/importance_sampling_ratio/max"] == pytest.approx(float(weight.max()))
    assert found["sampling/importance_sampling_ratio/min"] == pytest.approx(float(weight.min()))
    size = weight.sum() ** 2 / (weight.numel() * weight.square().sum())
    assert found["sampling/effective_sample_size"] == pytest.approx(float(size))
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(float(mismatch.max()))
    assert not metrics_of(one._replace(mask=torch.zeros_like(rows))).values()


def test_the_99th_percentile_of_the_mismatch_is_right_to_a_tenth() -> None:
    num = 20_000
    generator = torch.Generator().manual_seed(0)
    mismatch = 0.01 * torch.randn(num, generator=generator).abs() + 1e-4
    one = torch.ones(num)
    found = token_metrics(
        one, one, one - mismatch, one, one * 0, one * 0, one, torch.zeros(num).long()
    )
    value = found.values()["sampling/sampling_logp_difference/p99"]
    exact = float(mismatch.quantile(0.99))
    assert exact <= value <= 1.1 * exact
