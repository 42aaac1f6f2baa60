"""Running statistics against numpy over everything seen, and returns against a slow loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.errors import UniRLError
from unirl.policy.normalize import ReturnNorm, RunningNorm


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
    offset=st.sampled_from([0.0, 1e3, -1e5]),
)
def test_statistics_are_numpys_over_all_kept_rows(
    sizes: list[int], seed: int, offset: float
) -> None:
    rng = np.random.default_rng(seed)
    norm, kept = RunningNorm((3,)), []
    for size in sizes:
        x = rng.normal(offset, [1.0, 10.0, 0.01], (size, 2, 3)).astype(np.float32)
        mask = rng.random((size, 2)) < 0.6
        norm.update(torch.from_numpy(x), torch.from_numpy(mask))
        kept.append(x[mask])
    rows = np.concatenate(kept).astype(np.float64)
    assert norm.count.item() == len(rows)
    if len(rows):
        np.testing.assert_allclose(norm.mean.numpy(), rows.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(norm.var.numpy(), rows.var(0), rtol=1e-6, atol=1e-9)


def test_normalised_data_is_white_and_clipped() -> None:
    x = torch.randn(5000, 2, generator=torch.Generator().manual_seed(0)) * 7 + 100
    norm = RunningNorm((2,), clip=2.0)
    norm.update(x)
    wide = RunningNorm((2,), clip=100.0)
    wide.load_state_dict(norm.state_dict())
    y = wide.normalize(x)
    torch.testing.assert_close(y.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(y.std(0), torch.ones(2), atol=1e-3, rtol=0)
    assert norm.normalize(x).abs().max() == 2.0
    assert y.dtype == torch.float32


def test_nothing_seen_is_the_identity_also_after_an_empty_update() -> None:
    norm, x = RunningNorm((2,)), torch.tensor([[1.0, -3.0]])
    torch.testing.assert_close(norm.normalize(x), x)
    norm.update(x, torch.tensor([False]))
    torch.testing.assert_close(norm.normalize(x), x)


def test_masked_rows_may_be_nan() -> None:
    norm = RunningNorm((1,))
    norm.update(torch.tensor([[1.0], [torch.nan], [3.0]]), torch.tensor([True, False, True]))
    assert norm.mean.item() == 2.0
    assert norm.var.item() == 1.0


def test_normalize_leaves_its_input_alone() -> None:
    norm, x = RunningNorm((2,)), torch.full((4, 2), 3.0)
    norm.update(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)))
    norm.normalize(x)
    assert (x == 3.0).all()


@pytest.mark.parametrize(("x", "mask"), [((5, 2), (5,)), ((5, 3), (4,)), ((3,), (1,))])
def test_shapes_that_disagree_are_an_error(x: tuple[int, ...], mask: tuple[int, ...]) -> None:
    with pytest.raises(UniRLError, match="one mask entry per row"):
        RunningNorm((3,)).update(torch.zeros(x), torch.ones(mask, dtype=torch.bool))


def test_returns_are_those_of_a_slow_loop_over_unrolls_episodes_and_fillers() -> None:
    rng = np.random.default_rng(0)
    num_envs, gamma = 3, 0.9
    norm, carry = ReturnNorm(), torch.zeros(num_envs)
    slow_carry, seen, filler = np.zeros(num_envs), [], np.zeros(num_envs, bool)
    for length in (4, 1, 7, 5):
        reward = rng.normal(1.0, 2.0, (length, num_envs)).astype(np.float32)
        done, mask = np.zeros((2, length, num_envs), bool)
        for t in range(length):
            for b in range(num_envs):
                mask[t, b] = not filler[b]
                if filler[b]:
                    reward[t, b], filler[b] = 0.0, False
                    continue
                slow_carry[b] = slow_carry[b] * gamma + reward[t, b]
                seen.append(slow_carry[b])
                if rng.random() < 0.25:
                    done[t, b] = filler[b] = True
                    slow_carry[b] = 0.0
        arrays = (torch.from_numpy(a) for a in (reward, done, mask))
        carry = norm.update(*arrays, carry, gamma)
        np.testing.assert_allclose(carry.numpy(), slow_carry, rtol=1e-5, atol=1e-6)
    # The carry travels in float32, as in a slot.
    np.testing.assert_allclose(norm.returns.var.item(), np.var(seen), rtol=1e-5)
    scaled = norm.scale(torch.tensor([1.0, -2.0]))
    np.testing.assert_allclose(scaled.numpy(), np.array([1.0, -2.0]) / np.std(seen), rtol=1e-5)


def test_scaled_rewards_keep_their_sign_and_stay_within_the_clip() -> None:
    norm = ReturnNorm(clip=5.0)
    ones = torch.ones(50, 2, dtype=torch.bool)
    noise = 0.01 * torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    norm.update(noise, ~ones, ones, torch.zeros(2), 0.9)
    assert norm.scale(torch.tensor([100.0, -100.0])).tolist() == [5.0, -5.0]


def test_return_shapes_that_disagree_are_an_error() -> None:
    ones = torch.ones(5, 2, dtype=torch.bool)
    with pytest.raises(UniRLError, match="time-major"):
        ReturnNorm().update(torch.zeros(5, 2), ones, ones, torch.zeros(5), 0.9)
