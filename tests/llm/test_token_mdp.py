"""Which algorithms follow the exact policy gradient, and by how much the others miss it.

Expectations are sums over all samples of a small world: equality is exact, a bias is a figure. The
figures are those of docs/algorithms.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from tests.llm.token_world import TokenWorld, changed, compare
from unirl.llm.algorithms.terms import Algorithm

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
BOTH = (0, 0, 1, 1)
"""Two completions of the easy prompt and two of the hard one per batch."""

deep = TokenWorld(max_length=3)
worlds = [TokenWorld(max_length=2, seed=seed) for seed in range(3)]
bandit = TokenWorld(max_length=1)
loo = {"baseline": "leave_one_out"}


def exactly(found: Tensor, exact: Tensor, factor: float = 1.0) -> bool:
    return torch.allclose(found, factor * exact, atol=1e-10)


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_mean_of_the_others_is_a_baseline_without_bias(group_size: int) -> None:
    found = deep.expected(changed(**loo), [1] * group_size)
    assert exactly(found, deep.exact([1]))


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_groups_own_mean_shortens_the_gradient_by_one_over_its_size(group_size: int) -> None:
    found = deep.expected(changed(baseline="mean"), [1] * group_size)
    assert exactly(found, deep.exact([1]), (group_size - 1) / group_size)


def test_reinforce_without_a_baseline_has_no_bias() -> None:
    assert exactly(deep.expected(changed(), [0]), deep.exact([0]))


@pytest.mark.parametrize("objective", ["ppo", "cispo", "gspo", "sapo", "dppo"])
def test_every_objective_starts_with_the_policy_gradient(objective: str) -> None:
    """With ratios of 1: no clip has taken hold yet."""
    found = deep.expected(changed(objective=objective, dual_clip=3.0, **loo), [0, 0])
    assert exactly(found, deep.exact([0]))


def test_a_constant_number_of_tokens_changes_only_the_length_of_the_gradient() -> None:
    terms = changed(aggregation="seq-mean-token-sum-norm", norm_tokens=8, **loo)
    assert exactly(deep.expected(terms, [0, 0]), deep.exact([0]), 1 / 8)


@pytest.mark.parametrize("critic", ["exact", "wrong"])
def test_gae_with_lambda_1_has_no_bias_whatever_the_critic_says(critic: str) -> None:
    value = deep.value(deep.table, 0) if critic == "exact" else torch.linspace(-3, 3, 7).double()
    found = deep.expected(changed(advantage="gae"), [0], critic=value[None])
    assert exactly(found, deep.exact([0]))


def test_gae_with_smaller_lambda_has_no_bias_with_an_exact_critic_only() -> None:
    terms = changed(advantage="gae", gae_lambda=0.5)
    exact = deep.exact([0])
    assert exactly(deep.expected(terms, [0], critic=deep.value(deep.table, 0)[None]), exact)
    wrong = torch.linspace(-3, 3, 7).double()[None]
    assert not torch.allclose(deep.expected(terms, [0], critic=wrong), exact, atol=1e-2)


def test_vtrace_on_policy_has_no_bias_with_the_mean_of_the_others() -> None:
    found = deep.expected(changed(advantage="vtrace"), [1, 1])
    assert exactly(found, deep.exact([1]))


def test_vtrace_on_policy_has_no_bias_whatever_the_critic_says() -> None:
    value = torch.linspace(-3, 3, 7).double()[None]
    terms = changed(advantage="vtrace", vtrace_value="critic")
    assert exactly(deep.expected(terms, [0], critic=value), deep.exact([0]))


def test_kl_in_the_reward_is_the_gradient_of_reward_less_kl() -> None:
    terms = changed(kl_coef=0.3, kl="k1", kl_in="reward", kl_clamp=100.0, **loo)
    found = deep.expected(terms, [0, 0], reference=deep.stale)
    table = deep.table.clone().requires_grad_()
    new = deep.log_prob(table)
    gain = deep.reward[0] - 0.3 * (new - deep.log_prob(deep.stale))
    (exact,) = torch.autograd.grad(-(new.exp() * gain).sum(), table)
    assert exactly(found, exact)


def test_the_product_over_a_completion_corrects_old_samples_fully() -> None:
    terms = changed(correction="tis", correction_level="sequence")
    assert exactly(deep.expected(terms, [1], stale=True), deep.exact([1]))


def test_a_ratio_per_token_corrects_old_samples_fully_where_there_is_one_token() -> None:
    terms = changed(correction="tis", correction_high=math.inf)
    assert exactly(bandit.expected(terms, [0], stale=True), bandit.exact([0]))
    assert not exactly(deep.expected(terms, [1], stale=True), deep.exact([1]))


def test_vtrace_without_bounds_corrects_old_samples_fully_where_there_is_one_token() -> None:
    terms = changed(advantage="vtrace", rho_clip=math.inf, c_clip=math.inf, vtrace_value="critic")
    value = torch.tensor([[0.4]]).double()
    assert exactly(bandit.expected(terms, [0], stale=True, critic=value), bandit.exact([0]))


def test_a_ratio_to_the_engine_without_a_clip_is_the_same_correction() -> None:
    weighed = changed(correction="tis", correction_high=math.inf)
    ratio = changed(objective="ppo", ratio="behaviour", clip_low=1.0, clip_high=1e9)
    one, two = (deep.expected(terms, [1], stale=True) for terms in (weighed, ratio))
    assert torch.allclose(one, two, atol=1e-10)


Case: TypeAlias = Callable[[TokenWorld], Tensor]


def case(prompts: tuple[int, ...] = BOTH, **options: object) -> Case:
    """A row of the table: the expected gradient in a world of at most 2 tokens."""
    stale, apart = bool(options.pop("stale", False)), bool(options.pop("apart", False))
    critic = options.pop("critic", None)
    terms: Algorithm = changed(**options)

    def expected(world: TokenWorld) -> Tensor:
        value = torch.stack([world.value(world.table, p) for p in (0, 1)]) if critic else None
        return world.expected(terms, prompts, stale=stale, apart=apart, critic=value)

    return expected


def averaged(group_size: int, **options: object) -> Case:
    """Larger groups, one per batch: the mean over the prompts."""
    easy, hard = (case((p,) * group_size, **options) for p in (0, 1))
    return lambda world: (easy(world) + hard(world)) / 2


old = {"stale": True, **loo}
vtrace = {"stale": True, "advantage": "vtrace"}
CASES: dict[str, Case] = {
    "mean of the others": case(**loo),
    "group mean": case(baseline="mean"),
    "group mean, / group std": case(baseline="mean", scale="std"),
    "mean of the others, / batch std": case(scale="batch_std", apart=True, **loo),
    "group mean, whitened over the batch": case(baseline="mean", whiten="variance", apart=True),
    "no baseline, whitened over the batch": case(whiten="variance", apart=True),
    "group mean, / group std, groups of 4": averaged(4, baseline="mean", scale="std"),
    "mean and std of the others, groups of 4": averaged(4, scale="leave_one_out_std", **loo),
    "token-mean": case(aggregation="token-mean", **loo),
    "seq-mean-token-mean": case(aggregation="seq-mean-token-mean", **loo),
    "seq-mean-token-sum": case(aggregation="seq-mean-token-sum", **loo),
    "old samples: no correction": case(**old),
    "old samples: ratio of the completion (product)": case(
        correction="tis", correction_level="sequence", **old
    ),
    "old samples: product up to 2": case(
        correction="tis", correction_level="sequence", correction_high=2.0, **old
    ),
    "old samples: ratio per token": case(correction="tis", **old),
    "old samples: TIS, up to 2": case(correction="tis", correction_high=2.0, **old),
    "old samples: TIS, 0.5 .. 5": case(
        correction="tis", correction_low=0.5, correction_high=5.0, **old
    ),
    "old samples: IcePop, 0.5 .. 5": case(
        correction="icepop", correction_low=0.5, correction_high=5.0, **old
    ),
    "old samples: IcePop, product up to 3": case(
        correction="icepop", correction_level="sequence", correction_high=3.0, **old
    ),
    "old samples: PPO's clip to the engine, 0.2": case(objective="ppo", ratio="behaviour", **old),
    "old samples: CISPO to the engine, 0 .. 5": case(
        objective="cispo", ratio="behaviour", clip_low=1.0, clip_high=4.0, **old
    ),
    "old samples: DPPO to the engine, 0.2": case(objective="dppo", ratio="behaviour", **old),
    "old samples: SAPO to the engine": case(objective="sapo", ratio="behaviour", **old),
    "old samples: GSPO to the engine, 3e-4": case(
        objective="gspo", ratio="behaviour", clip_low=3e-4, clip_high=4e-4, **old
    ),
    "old samples: V-trace, mean of the others": case(**vtrace),
    "old samples: V-trace, exact critic": case(vtrace_value="critic", critic=True, **vtrace),
    "old samples: V-trace without bounds, exact critic": case(
        vtrace_value="critic", critic=True, rho_clip=math.inf, c_clip=math.inf, **vtrace
    ),
}


def documented() -> dict[str, tuple[float, float, float]]:
    """The rows of the table in the docs: name, mean length, mean angle, largest angle."""
    row = r"^\| ([^|]+) \| +([\d.]+) \| +([\d.]+)° \| +([\d.]+)° \|"
    found = re.findall(row, DOCS.read_text(), re.M)
    return {name.strip(): tuple(map(float, figures)) for name, *figures in found}  # type: ignore[misc]


def measured(name: str) -> tuple[float, float, float]:
    pairs = [compare(CASES[name](world), world.exact((0, 1))) for world in worlds]
    lengths, angles = zip(*pairs, strict=True)
    return sum(lengths) / len(worlds), sum(angles) / len(worlds), max(angles)


@pytest.mark.parametrize("name", CASES)
def test_the_bias_is_what_the_docs_say(name: str) -> None:
    length, angle, worst = documented()[name]
    assert measured(name) == (
        pytest.approx(length, abs=0.006),
        pytest.approx(angle, abs=0.06),
        pytest.approx(worst, abs=0.06),
    )


def test_the_docs_list_no_other_bias() -> None:
    assert set(documented()) == set(CASES)
