"""Claims about returns, GAE and V-trace over packed tokens."""

from __future__ import annotations

import math

import pytest
import torch

from tests.vtrace.reference import slow_vtrace_targets
from tests.vtrace.token_batch import batch
from tests.vtrace.token_reference import (
    slow_token_gae,
)
from unirl.vtrace import (
    group_baseline,
    token_gae,
    token_returns,
    token_rewards,
    token_vtrace,
    whiten_tokens,
)


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
