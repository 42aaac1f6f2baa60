"""Claims about PPO's advantages: GAE where on-policy, weighted where not, whitened."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.vtrace.reference import slow_vtrace_gae
from unirl.vtrace import VTrace, gae, vtrace_gae, vtrace_targets, whiten

clips = st.sampled_from([0.0, 0.3, 1.0, 1.7, math.inf])
lambdas = st.sampled_from([0.0, 0.5, 0.95, 1.0])
sizes = {"num_rows": st.integers(1, 12), "num_envs": st.integers(1, 4)}


def unroll(seed: int, num_rows: int, num_envs: int) -> tuple[dict[str, Tensor], Tensor]:
    """log_rho, discount, reward and value in float64 with ends of episodes, and a mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int = num_rows) -> Tensor:
        return torch.randn(rows, num_envs, generator=generator, dtype=torch.float64)

    discount = normal().sigmoid() * (normal() > -1)
    inputs = {"log_rho": normal(), "discount": discount, "reward": normal()}
    return {**inputs, "value": normal(num_rows + 1)}, normal() > -0.8


def assert_equal(got: VTrace, want: VTrace) -> None:
    for fast, slow in zip(got, want, strict=True):
        limit = 1e-12 * max(1.0, slow.abs().max().item())
        torch.testing.assert_close(fast, slow, rtol=0.0, atol=limit)


@given(
    seed=st.integers(0, 2**31),
    settings=st.fixed_dictionaries(
        {"rho_clip": clips, "c_clip": clips, "pg_rho_clip": st.none() | clips, "lambda_": lambdas}
    ),
    **sizes,
)
def test_it_equals_its_slow_twin(
    seed: int, num_rows: int, num_envs: int, settings: dict[str, Any]
) -> None:
    inputs, mask = unroll(seed, num_rows, num_envs)
    for rows in (mask, None):
        want = slow_vtrace_gae(**inputs, mask=rows, **settings)
        assert_equal(vtrace_gae(**inputs, mask=rows, **settings), want)


@given(seed=st.integers(0, 2**31), lambda_=lambdas, **sizes)
def test_on_policy_it_is_gae(seed: int, num_rows: int, num_envs: int, lambda_: float) -> None:
    inputs, mask = unroll(seed, num_rows, num_envs)
    inputs["log_rho"].zero_()
    got = vtrace_gae(**inputs, mask=mask, lambda_=lambda_)
    del inputs["log_rho"]
    assert_equal(got, VTrace(*gae(**inputs, mask=mask, lambda_=lambda_)))


@given(seed=st.integers(0, 2**31), rho_clip=clips, c_clip=clips, **sizes)
def test_at_lambda_one_it_is_vtrace(
    seed: int, num_rows: int, num_envs: int, rho_clip: float, c_clip: float
) -> None:
    inputs, mask = unroll(seed, num_rows, num_envs)
    settings = {"rho_clip": rho_clip, "c_clip": c_clip, "lambda_": 1.0, "mask": mask}
    assert_equal(vtrace_gae(**inputs, **settings), vtrace_targets(**inputs, **settings))


def test_an_action_that_the_policy_has_left_has_no_advantage() -> None:
    inputs, _ = unroll(0, 6, 3)
    inputs["log_rho"][2] = -math.inf
    advantage = vtrace_gae(**inputs).advantage
    assert not advantage[2].any() and advantage[[0, 1, 3, 4, 5]].all()


def test_what_a_masked_row_holds_is_ignored_and_no_single_ratio_overflows() -> None:
    inputs, mask = unroll(0, 6, 3)
    want = vtrace_gae(**inputs, mask=mask)
    poisoned = {
        name: torch.where(mask, tensor, math.nan) if name != "value" else tensor
        for name, tensor in inputs.items()
    }
    got = vtrace_gae(**poisoned, mask=mask)
    assert torch.equal(got.target, want.target) and torch.equal(got.advantage, want.advantage)
    assert not got.advantage[~mask].any()
    white = whiten(got.advantage, poisoned["log_rho"], mask)
    assert torch.equal(white, whiten(want.advantage, inputs["log_rho"], mask))
    inputs["log_rho"][3] = 1e30
    assert vtrace_gae(**inputs, rho_clip=math.inf).advantage.isfinite().all()


def test_no_gradient_flows_out_and_no_input_changes() -> None:
    inputs, mask = unroll(0, 6, 3)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    for tensor in inputs.values():
        tensor.requires_grad_()
    advantage = vtrace_gae(**inputs, mask=mask).advantage
    assert not advantage.requires_grad
    assert not whiten(advantage, inputs["log_rho"], mask).requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in inputs.items())


def test_a_wrong_shape_is_refused() -> None:
    inputs, _ = unroll(0, 6, 3)
    with pytest.raises(ValueError, match="log_rho has shape"):
        vtrace_gae(**{**inputs, "log_rho": inputs["log_rho"][:, :2]})


def test_whitened_advantages_are_the_usual_ones_on_policy_and_nothing_where_the_policy_left() -> (
    None
):
    torch.manual_seed(0)
    advantage, mask = torch.randn(5, 4) * 3 + 2, torch.ones(5, 4, dtype=torch.bool)
    mask[2] = False
    advantage[2] = 0.0
    kept = advantage[mask]
    on_policy = whiten(advantage, torch.zeros(5, 4), mask)
    torch.testing.assert_close(on_policy[mask], (kept - kept.mean()) / kept.std(unbiased=False))
    assert not on_policy[2].any()
    log_rho = torch.zeros(5, 4)
    log_rho[0] = -30.0
    left = whiten(advantage * log_rho.exp(), log_rho, mask)
    assert left[0].abs().max() < 1e-9
    assert left[mask].square().mean().sqrt() == pytest.approx(1.0)


def test_equal_advantages_and_a_batch_of_fillers_whiten_to_zero() -> None:
    ones, mask = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool)
    assert not whiten(ones, torch.zeros(3, 2), mask).any()
    assert not whiten(torch.zeros(3, 2), torch.zeros(3, 2), ~mask).any()
