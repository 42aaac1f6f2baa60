"""Claims about losses of packed tokens: against slow twins, whole under every split, inert where
masked.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from unirl.vtrace import (
    Aggregation,
    Correction,
    KlEstimate,
    Level,
    Loss,
    Objective,
    TokenMetrics,
    aggregate,
    aggregate_denominator,
    correction_weights,
    group_baseline,
    token_gae,
    token_kl,
    token_metrics,
    token_objective,
    token_returns,
    token_rewards,
    token_vtrace,
    whiten_tokens,
)
from unirl.vtrace.reference import slow_vtrace_targets
from unirl.vtrace.token_reference import (
    slow_aggregate,
    slow_correction_weights,
    slow_objective,
    slow_token_gae,
)

objectives: tuple[Objective, ...] = get_args(Objective)
aggregations: tuple[Aggregation, ...] = get_args(Aggregation)
bounds: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.3},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.5},
    "dppo": {"clip_low": 0.05, "clip_high": 0.08},
    "reinforce": {},
}


class Batch(NamedTuple):
    """Packed tokens in float64; num completions, one of which drew no token."""

    new_logp: Tensor
    old_logp: Tensor
    logp: Tensor
    advantage: Tensor
    mask: Tensor
    sequence: Tensor
    num: int


def batch(seed: int = 0, *, garbage: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(num: int) -> Tensor:
        return torch.randn(num, generator=generator, dtype=torch.float64)

    length = torch.tensor([5, 1, 7, 3, 2, 6])
    sequence = torch.arange(6).repeat_interleave(length)
    num = sequence.numel()
    mask = (torch.rand(num, generator=generator) > 0.25) & (sequence != 4)
    old = -normal(num).abs() - 0.05
    values = [old + 0.3 * normal(num), old, old + 0.4 * normal(num), normal(num)]
    if garbage:  # what masked tokens hold must not matter
        for value, filler in zip(values, (math.nan, math.inf, -math.inf, math.nan), strict=True):
            value[~mask] = filler
    return Batch(*values, mask=mask, sequence=sequence, num=6)


def loss_of(one: Batch, objective: Objective, aggregation: Aggregation) -> Loss:
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


def take(one: Batch, tokens: Tensor, completions: Tensor | None = None) -> Batch:
    """Some tokens, in that order, their completions numbered anew where told."""
    values = [value[tokens] for value in one[:6]]
    if completions is None:
        return Batch(*values, num=one.num)
    number = torch.full((one.num,), -1)
    number[completions] = torch.arange(completions.numel())
    values[5] = number[values[5]]
    return Batch(*values, num=completions.numel())


def gradient(total: Tensor, by: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(total, by)
    return found


@pytest.mark.parametrize("objective", objectives)
def test_objectives_and_their_gradients_equal_the_slow_twins(objective: Objective) -> None:
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
    objective: Objective, aggregation: Aggregation
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
    objective: Objective, aggregation: Aggregation
) -> None:
    one = batch(3)
    order = torch.cat([(one.sequence == s).nonzero().squeeze(1) for s in (3, 5, 0, 4, 2, 1)])
    want = loss_of(one, objective, aggregation)
    found = loss_of(take(one, order), objective, aggregation)
    assert torch.allclose(found.mean(), want.mean(), atol=1e-14)


@pytest.mark.parametrize("aggregation", aggregations)
@pytest.mark.parametrize("objective", objectives)
def test_what_masked_tokens_hold_does_not_matter(
    objective: Objective, aggregation: Aggregation
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
def test_extreme_ratios_overflow_nothing(objective: Objective) -> None:
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
            old_logp=old.double(),
        )
        found = gradient((old.double().exp() * kl).sum(), logits)
        if estimate == "k2":  # its value is not the KL's, so neither is this gradient
            assert not torch.allclose(found, exact, atol=1e-3)
        else:
            assert torch.allclose(found, exact, atol=1e-7)


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


def test_rewards_stand_at_the_last_drawn_token_and_penalties_everywhere() -> None:
    mask = torch.tensor([1, 1, 0, 1, 0, 0])
    sequence = torch.tensor([0, 0, 0, 1, 1, 2])
    penalty = torch.tensor([0.1, 0.2, math.nan, 0.3, math.inf, 9.0])
    reward = torch.tensor([1.0, 2.0, 5.0])
    found = token_rewards(reward, mask, sequence, penalty=penalty)
    assert torch.allclose(found, torch.tensor([-0.1, 0.8, 0.0, 1.7, 0.0, 0.0]))


@pytest.mark.parametrize("bootstrapped", [False, True])
def test_gae_skips_the_tokens_of_a_tool(bootstrapped: bool) -> None:
    one = batch(8, garbage=False)
    reward, value = one.new_logp, one.old_logp
    ahead = torch.linspace(-1, 1, one.num).double() if bootstrapped else None
    found = token_gae(
        reward,
        value,
        one.mask,
        one.sequence,
        one.num,
        discount=0.9,
        lambda_=0.8,
        bootstrap=ahead,
    )
    want = slow_token_gae(
        reward.tolist(),
        value.tolist(),
        one.mask.tolist(),
        one.sequence.tolist(),
        discount=0.9,
        lambda_=0.8,
        bootstrap=None if ahead is None else ahead.tolist(),
    )
    assert torch.allclose(found.advantage, found.advantage.new_tensor(want), atol=1e-12)
    assert torch.allclose(found.target[one.mask], (found.advantage + value)[one.mask])
    assert not found.target[~one.mask].any()


def test_what_a_tool_wrote_changes_no_advantage() -> None:
    """Two observation tokens with garbage for a value: skipped, as in verl and AReaL."""
    value = torch.tensor([0.5, 9.0, 9.0, 0.4, 0.3])
    reward, mask = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([1, 0, 0, 1, 1])
    found = token_gae(
        reward, value, mask, torch.zeros(5).long(), 1, discount=0.99, lambda_=0.95
    ).advantage
    without = token_gae(
        reward[[0, 3, 4]],
        value[[0, 3, 4]],
        torch.ones(3),
        torch.zeros(3).long(),
        1,
        discount=0.99,
        lambda_=0.95,
    ).advantage
    assert torch.allclose(found[[0, 3, 4]], without)


def test_returns_are_discounted_by_drawn_tokens() -> None:
    reward = torch.tensor([0.0, 7.0, 0.0, 1.0, 2.0])
    mask, sequence = torch.tensor([1, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 0, 1])
    found = token_returns(reward, mask, sequence, 2, discount=0.5)
    assert torch.equal(found, torch.tensor([0.25, 0.0, 0.5, 1.0, 2.0]))


@pytest.mark.parametrize("clip", [(1.0, 1.0), (1.5, 0.7), (math.inf, math.inf)])
def test_vtrace_of_packed_tokens_is_the_kernels_of_each_completion(
    clip: tuple[float, float],
) -> None:
    one = batch(9, garbage=False)
    log_rho, value = one.new_logp - one.logp, one.advantage
    reward = torch.where(one.mask, one.old_logp, 0.0)
    found = token_vtrace(
        log_rho,
        reward,
        value,
        one.mask,
        one.sequence,
        one.num,
        discount=0.9,
        lambda_=0.95,
        rho_clip=clip[0],
        c_clip=clip[1],
    )
    for s in range(one.num):
        rows = ((one.sequence == s) & one.mask).nonzero().squeeze(1)
        if not rows.numel():
            continue
        discount = torch.full((rows.numel(), 1), 0.9).double()
        discount[-1] = 0.0
        want = slow_vtrace_targets(
            log_rho[rows, None],
            discount,
            reward[rows, None],
            torch.cat([value[rows], value.new_zeros(1)])[:, None],
            rho_clip=clip[0],
            c_clip=clip[1],
            lambda_=0.95,
        )
        assert torch.allclose(found.advantage[rows], want.advantage[:, 0], atol=1e-12)
        assert torch.allclose(found.target[rows], want.target[:, 0], atol=1e-12)
    assert not found.advantage[~one.mask].any()


def test_vtrace_on_policy_with_the_mean_of_the_others_is_rloo() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3).long()
    sequence, mask = torch.tensor([0, 0, 1, 2, 2, 2]), torch.ones(6)
    others = group_baseline(reward, group, torch.ones(3), leave_one_out=True)
    found = token_vtrace(
        torch.zeros(6),
        token_rewards(reward, mask, sequence),
        others[sequence],
        mask,
        sequence,
        3,
    )
    assert torch.allclose(found.advantage, (reward - others)[sequence])


def test_whitened_advantages_have_mean_zero_and_size_one_over_what_was_drawn() -> None:
    one = batch(10)
    for by in ("variance", "floor", "std"):
        found = whiten_tokens(one.advantage, one.mask, by=by, epsilon=1e-12)[one.mask]
        assert abs(float(found.mean())) < 1e-12
        assert abs(float(found.std()) - 1) < 1e-9
    assert not whiten_tokens(one.advantage, one.mask)[~one.mask].any()


def test_whitening_needs_the_sums_of_all_processes_only() -> None:
    one = batch(11)
    whole = whiten_tokens(one.advantage, one.mask)
    half = one.sequence < 3
    parts = [(one.advantage[half], one.mask[half]), (one.advantage[~half], one.mask[~half])]
    filled = [torch.where(mask, value, 0.0) for value, mask in parts]
    mean = torch.where(one.mask, one.advantage, 0.0).sum() / one.mask.sum()
    squares = [
        torch.where(mask, value - mean, 0.0).square().sum()
        for value, (_, mask) in zip(filled, parts, strict=True)
    ]
    other = iter([[filled[1].sum(), parts[1][1].sum()], [squares[1]]])
    found = whiten_tokens(
        *parts[0], reduce=lambda sums: [a + b for a, b in zip(sums, next(other), strict=True)]
    )
    assert torch.allclose(found, whole[half], atol=1e-12)


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
def test_bfloat16_log_probs_are_computed_in_float32(objective: Objective) -> None:
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
