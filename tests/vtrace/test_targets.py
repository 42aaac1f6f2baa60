"""Claims about V-trace and GAE: equal to their slow twins, safe at the edges, compilable."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.vtrace.reference import slow_gae, slow_vtrace_targets
from unirl.vtrace import GAE, VTrace, gae, vtrace_targets

devices = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Case(NamedTuple):
    """One unroll in float64, and the settings to correct it with."""

    log_rho: Tensor
    discount: Tensor
    reward: Tensor
    value: Tensor
    mask: Tensor | None
    rho_clip: float
    c_clip: float
    lambda_: float
    pg_rho_clip: float | None = None

    def vtrace(self, function: Callable[..., VTrace] = vtrace_targets) -> VTrace:
        """Targets of this case by the fast or the slow form."""
        return function(
            self.log_rho,
            self.discount,
            self.reward,
            self.value,
            mask=self.mask,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
            pg_rho_clip=self.pg_rho_clip,
            lambda_=self.lambda_,
        )

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        """The same case in another dtype or on another device."""
        mask = None if self.mask is None else self.mask.to(device)
        log_rho, discount, reward, value = (x.to(device, dtype) for x in self[:4])
        return self._replace(
            log_rho=log_rho, discount=discount, reward=reward, value=value, mask=mask
        )

    def but(self, **changes: Any) -> Case:
        """The same case with some of its fields replaced."""
        return self._replace(**changes)


def make_case(
    seed: int,
    num_rows: int,
    num_envs: int,
    scale: float = 1.0,
    masked: bool = True,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    lambda_: float = 1.0,
    pg_rho_clip: float | None = None,
) -> Case:
    """A random unroll with ends of episodes (discount 0) and fillers (mask False)."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(num_rows, num_envs, generator=generator, dtype=torch.float64)

    def normal(rows: int = num_rows) -> Tensor:
        return torch.randn(rows, num_envs, generator=generator, dtype=torch.float64)

    discount = uniform() * (uniform() > 0.2)
    mask = uniform() > 0.25 if masked else None
    return Case(
        scale * normal(),
        discount,
        normal(),
        normal(num_rows + 1),
        mask,
        rho_clip,
        c_clip,
        lambda_,
        pg_rho_clip,
    )


clips = st.sampled_from([0.0, 0.3, 1.0, 1.7, math.inf])
cases = st.builds(
    make_case,
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 14),
    num_envs=st.integers(1, 5),
    scale=st.sampled_from([0.0, 0.3, 1.0]),
    masked=st.booleans(),
    rho_clip=clips,
    c_clip=clips,
    lambda_=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    pg_rho_clip=st.none() | clips,
)


def assert_close(fast: VTrace | GAE, slow: VTrace | GAE, tolerance: float) -> None:
    """Equal up to `tolerance`, relative to the largest number of each result (or 1)."""
    for got, want in zip(fast, slow, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        limit = tolerance * max(1.0, want.abs().max().item())
        torch.testing.assert_close(got, want, rtol=0.0, atol=limit)


@given(case=cases)
def test_vtrace_equals_its_slow_twin(case: Case) -> None:
    assert_close(case.vtrace(), case.vtrace(slow_vtrace_targets), 1e-12)


@given(case=cases)
def test_a_clip_of_its_own_for_the_policy_gradient_leaves_the_targets_as_they_are(
    case: Case,
) -> None:

    ours, before = case.vtrace(), case.but(pg_rho_clip=None).vtrace()
    assert torch.equal(ours.target, before.target)
    same = case.but(pg_rho_clip=case.rho_clip).vtrace()
    torch.testing.assert_close(same.advantage, before.advantage, rtol=1e-12, atol=1e-12)


def test_the_policy_gradients_advantage_is_that_of_torchbeast_and_rlax() -> None:
    # clipped_pg_rhos * (rewards + discounts * vs_t_plus_1 - values), TorchBeast's vtrace.py.
    case = make_case(3, 6, 2, masked=False, pg_rho_clip=2.5)
    target, advantage = case.vtrace()
    ahead = torch.cat((target[1:], case.value[-1:]))
    weight = case.log_rho.exp().clamp(max=2.5)
    want = weight * (case.reward + case.discount * ahead - case.value[:-1])
    torch.testing.assert_close(advantage, want)
    assert not torch.allclose(advantage, case.but(pg_rho_clip=None).vtrace().advantage)


@given(case=cases)
def test_vtrace_in_float32_is_close_to_its_float64_twin(case: Case) -> None:
    case = case.to(torch.float32)
    fast, slow = case.vtrace(), case.to(torch.float64).vtrace(slow_vtrace_targets)
    assert_close(fast, VTrace(*(x.float() for x in slow)), 1e-5)


@given(case=cases)
def test_gae_equals_its_slow_twin(case: Case) -> None:
    inputs = case.discount, case.reward, case.value
    fast = gae(*inputs, mask=case.mask, lambda_=case.lambda_)
    assert_close(fast, slow_gae(*inputs, mask=case.mask, lambda_=case.lambda_), 1e-12)


@given(case=cases)
def test_on_policy_vtrace_is_gae_with_lambda_one(case: Case) -> None:
    case = case._replace(
        log_rho=torch.zeros_like(case.log_rho),
        rho_clip=1.0,
        c_clip=1.0,
        lambda_=1.0,
        pg_rho_clip=None,
    )
    on_policy = gae(case.discount, case.reward, case.value, mask=case.mask, lambda_=1.0)
    assert_close(GAE(*case.vtrace()), on_policy, 1e-12)


@given(case=cases)
def test_a_masked_row_keeps_its_own_value_and_whatever_it_holds_is_ignored(case: Case) -> None:
    mask = torch.ones_like(case.reward, dtype=torch.bool) if case.mask is None else case.mask
    clean = case._replace(mask=mask)
    poisoned = clean._replace(
        log_rho=torch.where(mask, case.log_rho, math.nan),
        discount=torch.where(mask, case.discount, math.nan),
        reward=torch.where(mask, case.reward, math.inf),
    )
    want, got = clean.vtrace(), poisoned.vtrace()
    assert torch.equal(got.target, want.target) and torch.equal(got.advantage, want.advantage)
    assert torch.equal(got.target[~mask], case.value[:-1][~mask])
    assert not got.advantage[~mask].any()
    same = gae(poisoned.discount, poisoned.reward, case.value, mask=mask)
    assert torch.equal(same.target[~mask], case.value[:-1][~mask])
    assert same.target.isfinite().all() and not same.advantage[~mask].any()


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.uint8])
def test_an_episode_computed_by_hand(mask_dtype: torch.dtype) -> None:
    # Columns: the episode continues; terminates at row 1; is truncated at row 1. Row 2 of the last
    # two is the filler, whose value is that of the final observation.
    reward = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [4.0, 0.0, 0.0], [8.0, 8.0, 8.0]])
    discount = torch.full((4, 3), 0.5)
    discount[1, 1] = 0.0
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).to(mask_dtype)
    value = torch.tensor([[10.0] * 3, [20.0] * 3, [40.0] * 3, [60.0] * 3, [32.0] * 3])
    last = 8 + 0.5 * 32
    continues = [1 + 0.5 * (2 + 0.5 * (4 + 0.5 * last)), 2 + 0.5 * (4 + 0.5 * last)]
    want = torch.tensor(
        [
            [continues[0], 1 + 0.5 * 2, 1 + 0.5 * (2 + 0.5 * 40)],
            [continues[1], 2.0, 2 + 0.5 * 40],
            [4 + 0.5 * last, 40.0, 40.0],
            [last, last, last],
        ]
    )
    got = vtrace_targets(torch.zeros(4, 3), discount, reward, value, mask=mask)
    assert torch.equal(got.target, want)
    assert torch.equal(got.advantage, (want - value[:-1]) * (mask != 0))
    # The new policy never does what was done at row 0: nothing is learned there, all else stays.
    log_rho = torch.zeros(4, 3)
    log_rho[0] = -math.inf
    got = vtrace_targets(log_rho, discount, reward, value, mask=mask)
    assert torch.equal(got.target[0], value[0]) and torch.equal(got.target[1:], want[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho_clip", [1.0, math.inf])
def test_no_ratio_however_extreme_overflows(dtype: torch.dtype, rho_clip: float) -> None:
    case = make_case(3, 8, 4).to(dtype)
    extremes = torch.tensor([math.inf, -math.inf, 1e30, -1e30, 800.0, -800.0, 90.0, 0.0])
    case = case._replace(log_rho=extremes.to(dtype)[:, None].expand(8, 4), rho_clip=rho_clip)
    result = case.vtrace()
    assert result.target.isfinite().all() and result.advantage.isfinite().all()
    if rho_clip == 1.0:
        assert_close(result, case.vtrace(slow_vtrace_targets), 1e-5)


def test_no_gradient_flows_out_and_no_input_changes() -> None:
    case = make_case(0, 6, 3)
    before = [x.clone() for x in case[:4]]
    for tensor in case[:4]:
        tensor.requires_grad_()
    results = [*case.vtrace(), *gae(case.discount, case.reward, case.value, mask=case.mask)]
    assert not any(result.requires_grad for result in results)
    assert all(torch.equal(x, y) for x, y in zip(case[:4], before, strict=True))


@pytest.mark.parametrize("name", ["log_rho", "discount", "reward", "value", "mask"])
def test_a_wrong_shape_is_refused_with_both_shapes(name: str) -> None:
    case = make_case(0, 6, 3)
    wrong = torch.cat([getattr(case, name)] * 2, dim=1)
    with pytest.raises(ValueError, match=r"\(\d, 6\).*\(\d, 3\)|\(\d, 3\).*\(\d, 6\)") as error:
        case.but(**{name: wrong}).vtrace()
    assert name in str(error.value)


def test_a_forgotten_bootstrap_row_is_named() -> None:
    case = make_case(0, 6, 3)
    with pytest.raises(ValueError, match="Append the value of the observation after the last step"):
        gae(case.discount, case.reward, case.value[:-1])


def test_an_unroll_without_rows_or_batch_axis_is_refused() -> None:
    empty, flat = torch.zeros(0, 3), torch.zeros(6)
    with pytest.raises(ValueError, match="T >= 1"):
        gae(empty, empty, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="batch axis"):
        gae(flat, flat, torch.zeros(7))


@pytest.mark.parametrize("name", ["log_rho", "discount", "reward"])
def test_mixed_dtypes_are_refused_with_both_dtypes(name: str) -> None:
    case = make_case(0, 6, 3)
    with pytest.raises(ValueError, match=rf"{name} has dtype torch.float32 .* torch.float64"):
        case.but(**{name: getattr(case, name).float()}).vtrace()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_a_dtype_too_coarse_for_returns_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"value has dtype {dtype}"):
        make_case(0, 6, 3).to(dtype).vtrace()


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("rho_clip", -0.1),
        ("pg_rho_clip", -0.1),
        ("c_clip", math.nan),
        ("lambda_", 1.1),
        ("lambda_", math.nan),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, setting: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {setting}"):
        make_case(0, 6, 3).but(**{name: setting}).vtrace()


@pytest.mark.parametrize("device", devices)
def test_compiles_without_a_graph_break(device: str) -> None:
    @torch.compile(fullgraph=True)
    def both(
        log_rho: Tensor, discount: Tensor, reward: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[VTrace, GAE]:
        return (
            vtrace_targets(
                log_rho, discount, reward, value, mask=mask, rho_clip=math.inf, lambda_=0.9
            ),
            gae(discount, reward, value, mask=mask),
        )

    case = make_case(1, 5, 3, rho_clip=math.inf, lambda_=0.9).to(torch.float32, device)
    assert case.mask is not None
    compiled = both(*case[:4], case.mask)
    assert_close(compiled[0], case.vtrace(), 1e-5)
    assert_close(compiled[1], gae(case.discount, case.reward, case.value, mask=case.mask), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_equals_the_slow_twin(dtype: torch.dtype) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    case = make_case(2, 20, 32, rho_clip=1.7, lambda_=0.95).to(dtype, "cuda")
    assert_close(case.vtrace(), case.vtrace(slow_vtrace_targets), tolerance)
    inputs = case.discount, case.reward, case.value
    assert_close(gae(*inputs, mask=case.mask), slow_gae(*inputs, mask=case.mask), tolerance)
    with pytest.raises(ValueError, match="one device"):
        case._replace(reward=case.reward.cpu()).vtrace()
