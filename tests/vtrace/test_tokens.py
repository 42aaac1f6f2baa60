"""Claims about losses of packed tokens: against slow twins, whole under every split, inert where
masked.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from tests.vtrace.token_batch import Batch, batch, gradient, take
from tests.vtrace.token_reference import (
    slow_aggregate,
    slow_correction_weights,
    slow_objective,
)
from unirl.vtrace import (
    Aggregation,
    Correction,
    Level,
    Loss,
    ObjectiveName,
    aggregate,
    aggregate_denominator,
    correction_weights,
    token_objective,
)

objectives: tuple[ObjectiveName, ...] = get_args(ObjectiveName)
aggregations: tuple[Aggregation, ...] = get_args(Aggregation)
bounds: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.3},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.5},
    "dppo": {"clip_low": 0.05, "clip_high": 0.08},
    "reinforce": {},
}


def loss_of(one: Batch, objective: ObjectiveName, aggregation: Aggregation) -> Loss:
    """Everything between log-probs and a loss."""
    found = token_objective(
        one.new_logp,
        one.old_logp,
        one.advantage,
        one.mask,
        one.sequence,
        one.num,
        objective=objective,
        **bounds[objective],
    )
    weight = correction_weights(one.old_logp, one.logp, one.mask, one.sequence, one.num)
    return aggregate(
        found.loss * weight,
        one.mask,
        one.sequence,
        one.num,
        aggregation=aggregation,
        norm_tokens=7,
    )


@pytest.mark.parametrize("objective", objectives)
def test_objectives_and_their_gradients_equal_the_slow_twins(objective: ObjectiveName) -> None:
    for seed in range(5):
        one = batch(seed, garbage=False)
        new = one.new_logp.requires_grad_()
        found = token_objective(
            new,
            one.old_logp,
            one.advantage,
            one.mask,
            one.sequence,
            one.num,
            objective=objective,
            **bounds[objective],
        )
        want = slow_objective(
            new.tolist(),
            one.old_logp.tolist(),
            one.advantage.tolist(),
            one.mask.tolist(),
            one.sequence.tolist(),
            objective=objective,
            **bounds[objective],
        )
        assert torch.allclose(found.loss, found.loss.new_tensor(want.loss), atol=1e-12)
        slope = gradient(found.loss.sum(), new)
        assert torch.allclose(slope, slope.new_tensor(want.gradient), atol=1e-12)


@pytest.mark.parametrize("aggregation", aggregations)
def test_aggregations_equal_the_slow_twin(aggregation: Aggregation) -> None:
    one = batch(1, garbage=False)
    found = aggregate(
        one.advantage, one.mask, one.sequence, one.num, aggregation=aggregation, norm_tokens=7
    )
    want = slow_aggregate(
        one.advantage.tolist(),
        one.mask.tolist(),
        one.sequence.tolist(),
        aggregation=aggregation,
        norm_tokens=7,
    )
    assert math.isclose(float(found.mean()), want, abs_tol=1e-14)


@pytest.mark.parametrize("aggregation", aggregations)
@pytest.mark.parametrize("objective", objectives)
def test_no_split_into_micro_batches_changes_loss_or_gradient(
    objective: ObjectiveName, aggregation: Aggregation
) -> None:
    one = batch(2)
    new = one.new_logp.requires_grad_()
    whole = loss_of(one, objective, aggregation)
    want = gradient(whole.mean(), new)
    for parts in ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[4], [2, 0], [5], [3, 1]]):
        pieces = []
        for part in parts:
            completions = torch.tensor(part)
            tokens = torch.isin(one.sequence, completions).nonzero().squeeze(1)
            pieces.append(take(one, tokens, completions))
        total = sum(
            aggregate_denominator(p.mask, p.sequence, p.num, aggregation=aggregation)
            for p in pieces
        )
        found = [loss_of(p, objective, aggregation).numerator / total for p in pieces]
        assert torch.allclose(torch.stack(found).sum(), whole.mean(), atol=1e-14)
        assert torch.allclose(gradient(torch.stack(found).sum(), new), want, atol=1e-14)


@pytest.mark.parametrize("aggregation", aggregations)
@pytest.mark.parametrize("objective", objectives)
def test_the_order_of_packing_does_not_matter(
    objective: ObjectiveName, aggregation: Aggregation
) -> None:
    one = batch(3)
    order = torch.cat([(one.sequence == s).nonzero().squeeze(1) for s in (3, 5, 0, 4, 2, 1)])
    want = loss_of(one, objective, aggregation)
    found = loss_of(take(one, order), objective, aggregation)
    assert torch.allclose(found.mean(), want.mean(), atol=1e-14)


@pytest.mark.parametrize("aggregation", aggregations)
@pytest.mark.parametrize("objective", objectives)
def test_what_masked_tokens_hold_does_not_matter(
    objective: ObjectiveName, aggregation: Aggregation
) -> None:
    clean, dirty = batch(4, garbage=False), batch(4)
    results = []
    for one in (clean, dirty):
        new = one.new_logp.requires_grad_()
        loss = loss_of(one, objective, aggregation)
        results.append((loss.mean(), gradient(loss.mean(), new)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][~dirty.mask].any()


def test_a_part_without_drawn_tokens_has_loss_and_gradient_zero() -> None:
    one = batch(0)
    new = one.new_logp.requires_grad_()
    none = one._replace(mask=torch.zeros_like(one.mask))
    for objective in objectives:
        for aggregation in aggregations:
            loss = loss_of(none, objective, aggregation)
            assert loss.mean() == 0 and loss.denominator == 0
            assert not gradient(loss.mean(), new).any()


@pytest.mark.parametrize("objective", objectives)
def test_extreme_ratios_overflow_nothing(objective: ObjectiveName) -> None:
    new = torch.tensor([-1e-4, -300.0, -0.5]).requires_grad_()
    old, gain = torch.tensor([-300.0, -1e-4, -0.5]), torch.tensor([-1.0, -1.0, 1.0])
    sequence = torch.tensor([0, 1, 2])
    found = token_objective(new, old, gain, torch.ones(3), sequence, 3, objective=objective)
    assert found.loss.isfinite().all()
    assert gradient(found.loss.sum(), new).isfinite().all()


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("correction", get_args(Correction))
def test_correction_weights_equal_the_slow_twin(correction: Correction, level: Level) -> None:
    one = batch(5, garbage=False)
    options: dict[str, Any] = {"correction": correction, "level": level, "low": 0.8, "high": 1.2}
    found = correction_weights(one.old_logp, one.logp, one.mask, one.sequence, one.num, **options)
    want = slow_correction_weights(
        one.old_logp.tolist(),
        one.logp.tolist(),
        one.mask.tolist(),
        one.sequence.tolist(),
        **options,
    )
    assert torch.allclose(found, found.new_tensor(want), atol=1e-12)


def test_a_sequence_mask_drops_whole_completions_and_keeps_the_denominator() -> None:
    old = torch.tensor([0.0, 0.0, 0.0, 0.0])
    drawn = torch.tensor([0.0, 0.02, -1.0, -1.0])
    sequence, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4)
    weight = correction_weights(
        old,
        drawn,
        mask,
        sequence,
        2,
        correction="tis",
        high=math.inf,
        sequence_mask="geometric",
        mask_low=0.9,
        mask_high=1.1,
    )
    assert torch.allclose(weight, torch.tensor([1.0, math.exp(-0.02), 0.0, 0.0]))
    loss = aggregate(torch.ones(4) * weight, mask, sequence, 2)
    assert loss.denominator == 4


def test_a_product_over_a_long_completion_is_what_its_docs_warn_of() -> None:
    num = 1000
    old, drawn = torch.zeros(num, dtype=torch.float64), torch.full((num,), -0.012).double()
    sequence, mask = torch.zeros(num).long(), torch.ones(num)
    weights = [
        float(
            correction_weights(
                old, drawn, mask, sequence, 1, correction="tis", level=level, high=math.inf
            )[0]
        )
        for level in get_args(Level)
    ]
    assert weights == pytest.approx([math.exp(0.012), math.exp(12.0), math.exp(0.012)])


def test_shapes_that_would_broadcast_are_refused() -> None:
    one = batch(0)
    with pytest.raises(ValueError, match="one entry per packed token"):
        token_objective(
            one.new_logp[:, None], one.old_logp, one.advantage, one.mask, one.sequence, one.num
        )
    with pytest.raises(ValueError, match="packed tokens are"):
        aggregate(one.advantage, one.mask[:, None], one.sequence, one.num)
    with pytest.raises(ValueError, match="are int64"):
        aggregate(one.advantage, one.mask, one.sequence.int(), one.num)


@pytest.mark.parametrize("objective", objectives)
def test_bfloat16_log_probs_are_computed_in_float32(objective: ObjectiveName) -> None:
    one = batch(0)
    found = token_objective(
        one.new_logp.bfloat16(),
        one.old_logp.bfloat16(),
        one.advantage.float(),
        one.mask,
        one.sequence,
        one.num,
        objective=objective,
    )
    assert found.loss.dtype == torch.float32
