"""Golden numbers: each named system's formulas, written out in numpy, against its preset.

Nothing of ours is called for what is expected. Completions are rows of a padded matrix here, as in
those systems; ours are packed. Two completions of one group are empty-handed, lengths differ, and
ratios and the engine's mismatch leave every bound somewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unirl.llm.algorithms.advantages import advantages, overlong_penalty
from unirl.llm.algorithms.batch_file import SavedBatch
from unirl.llm.algorithms.describe import describe
from unirl.llm.algorithms.diff import outcome
from unirl.llm.algorithms.presets import DEFAULT, PRESETS
from unirl.llm.algorithms.terms import Algorithm
from unirl.vtrace import correction_weights, group_advantages

Array: TypeAlias = NDArray[np.float64]
Golden: TypeAlias = tuple[float, Array]
"""Loss, and its gradient by the log-probability of each token."""

rng = np.random.default_rng(7)
S, T, G = 8, 6, 4
MAX_TOKENS = 5  # tools wrote one token of the longest: a penalty without a cap shows
length = np.array([3, 6, 1, 4, 2, 5, 6, 2])
M: Array = (np.arange(T) < length[:, None]).astype(float)
r: Array = np.array([1.0, 0.0, 0.0, 0.25, 0.5, 0.9, 0.9, 0.1])
old: Array = -np.abs(rng.normal(size=(S, T))) - 0.02
new: Array = old + 0.25 * rng.normal(size=(S, T))
mu: Array = old + 0.5 * rng.normal(size=(S, T))
ref: Array = old + 0.4 * rng.normal(size=(S, T))
# Beyond the dual clip (3) and both sides of PPO's clip where the advantage is negative, and beyond
# the largest weight of all (5).
old[1, 2], new[1, 2] = -2.0, -0.5
new[[2, 7, 3, 1], [0, 1, 1, 4]] = old[[2, 7, 3, 1], [0, 1, 1, 4]] - 0.8
old[4, 1], mu[4, 1] = -0.5, -2.5
V: Array = 0.4 + 0.2 * rng.normal(size=(S, T))
n: Array = M.sum(1)


def packed(values: Array) -> torch.Tensor:
    return torch.from_numpy(values[M > 0])


BATCH = SavedBatch(
    new_logp=packed(new),
    old_logp=packed(old),
    logp=packed(mu),
    reference=packed(ref),
    value=packed(V),
    mask=torch.ones(int(M.sum()), dtype=torch.bool),
    sequence=torch.from_numpy(np.repeat(np.arange(S), length)),
    reward=torch.from_numpy(r),
    group=torch.arange(S) // G,
    valid=torch.ones(S, dtype=torch.bool),
    max_tokens=MAX_TOKENS,
)

# The pieces that several systems share, each a line of theirs.
R = r.reshape(-1, G)
mean, std = R.mean(1, keepdims=True), R.std(1, ddof=1, keepdims=True)


def rows(score: Array) -> Array:
    """One number per completion, on all its tokens."""
    return np.broadcast_to(score.reshape(S, 1), (S, T))


def clipped(A: Array, low: float, high: float, ratio: Array, dual: float = 1e9) -> Golden2:
    """max(-rho A, -clip(rho) A), for A < 0 at most -dual A; and its derivative by log pi."""
    one, two = -ratio * A, -np.clip(ratio, 1 - low, 1 + high) * A
    loss = np.maximum(one, two)
    slope = np.where(one >= two, -ratio * A, 0.0)
    far = (A < 0) & (loss > -dual * A)
    return np.where(far, -dual * A, loss), np.where(far, 0.0, slope)


Golden2: TypeAlias = tuple[Array, Array]
"""Loss per token, and its derivative by log pi."""


def token_mean(loss: Array, slope: Array) -> Golden:
    return float((loss * M).sum() / M.sum()), slope * M / M.sum()


def mean_of_means(loss: Array, slope: Array) -> Golden:
    return float(((loss * M).sum(1) / n).mean()), slope * M / n[:, None] / S


def constant(loss: Array, slope: Array) -> Golden:
    return float((loss * M).sum() / (S * MAX_TOKENS)), slope * M / (S * MAX_TOKENS)


def returns(last: Array, penalty: Array | float = 0.0, gamma: float = 1.0) -> Array:
    """Reward at the last token, a penalty on each, summed from behind."""
    token = -penalty * M
    token[np.arange(S), length - 1] += last
    total, run = np.zeros((S, T)), np.zeros(S)
    for t in reversed(range(T)):
        run = token[:, t] + gamma * run
        total[:, t] = run
    return total * M


def gae(penalty: Array | float = 0.0) -> Array:
    """gamma = lambda = 1, nothing after the end."""
    token = -penalty * M
    token[np.arange(S), length - 1] += r
    advantage, run, ahead = np.zeros((S, T)), np.zeros(S), np.zeros(S)
    for t in reversed(range(T)):
        found = token[:, t] + ahead - V[:, t] + run
        run = np.where(M[:, t] > 0, found, run)
        ahead = np.where(M[:, t] > 0, V[:, t], ahead)
        advantage[:, t] = run
    return advantage * M


def verl_whiten(x: Array) -> Array:
    """(x - mean) * rsqrt(unbiased variance + 1e-8)."""
    centred = (x - (x * M).sum() / M.sum()) * M
    variance = (centred**2).sum() / (M.sum() - 1)
    return centred / np.sqrt(variance + 1e-8)


def openrlhf_whiten(x: Array) -> Array:
    """(x - mean) * rsqrt(max(biased variance, 1e-8))."""
    centred = (x - (x * M).sum() / M.sum()) * M
    return centred / np.sqrt(max((centred**2).sum() / M.sum(), 1e-8))


rho: Array = np.exp(new - old)
s: Array = rows(np.exp(((new - old) * M).sum(1) / n))
w: Array = np.exp(old - mu)
kl1: Array = 0.01 * (old - ref)

verl_A = rows((R - mean) / (std + 1e-6))
trl_A = rows((R - mean) / (std + 1e-4))
trl_w = rows(((old - mu) * M).sum(1))
trl_w = np.where(np.exp(trl_w) > 3.0, 0.0, np.exp(trl_w))


def weighed(pair: Golden2, weight: Array) -> Golden2:
    return pair[0] * weight, pair[1] * weight


def cispo(A: Array, low: float, high: float) -> Golden2:
    weight = np.clip(rho, low, high)
    return -weight * A * new, -weight * A


def sapo(A: Array) -> Golden2:
    tau = np.where(A > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-tau * (rho - 1)))
    return -A * 4 / tau * gate, -A * 4 * gate * (1 - gate) * rho


def nemo() -> Golden:
    """Baseline and deviation of the others, undivided where they agree; k3 in the loss, times
    exp(log pi - sg(log pi)).
    """
    A = np.zeros(S)
    for i in range(S):
        others = np.delete(R[i // G], i % G)
        spread = others.std(ddof=1)
        A[i] = (r[i] - others.mean()) / (spread + 1e-6 if spread > 0 else 1.0)
    loss, slope = clipped(rows(A), 0.2, 0.2, rho)
    k3 = np.exp(ref - new) - 1 - (ref - new)
    k3_slope = 1 - np.exp(ref - new) + k3  # of the estimate, and of having drawn the token
    return token_mean(loss + 0.01 * k3, slope + 0.01 * k3_slope)


def areal() -> Golden:
    """Group norm of rewards, batch norm of advantages (std + 1e-5), tokens with w > 5 weigh 0."""
    A = rows((R - mean) / (std + 1e-5))
    centred = (A - (A * M).sum() / M.sum()) * M
    A = centred / (np.sqrt((centred**2).sum() / (M.sum() - 1)) + 1e-5)
    return token_mean(*weighed(clipped(A, 0.4, 0.4, rho), np.where(w > 5.0, 0.0, w)))


def skyrl() -> Golden:
    loss, slope = clipped(verl_A, 0.2, 0.2, rho)
    k3 = np.exp(ref - new) - (ref - new) - 1
    return token_mean(loss + 0.001 * k3, slope + 0.001 * (1 - np.exp(ref - new)))


def prime_rl() -> Golden:
    """Tokens whose probability left the engine's by 0.2 in A's direction drop out; 1e-3 d^2."""
    A = rows(R - mean)
    d = new - mu
    moved = np.exp(new) - np.exp(mu)
    keep = 1.0 - np.where(A > 0, moved > 0.2, moved < -0.2)
    loss = -keep * A * np.exp(d) + 1e-3 * d**2
    return token_mean(loss, -keep * A * np.exp(d) + 2e-3 * d)


def dapo_verl() -> Golden:
    """Overlong: 0.2 of MAX_TOKENS, not capped; clip-higher."""
    shaped = r + np.minimum(-(length - (MAX_TOKENS - 1)) / 1, 0.0)
    groups = shaped.reshape(-1, G)
    A = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    return token_mean(*clipped(rows(A), 0.2, 0.28, rho, dual=3.0))


leave_one_out = R - (R.sum(1, keepdims=True) - R) / (G - 1)
golden: dict[str, Callable[[], Golden]] = {
    "verl:grpo": lambda: token_mean(*clipped(verl_A, 0.2, 0.2, rho, dual=3.0)),
    "verl:dapo": dapo_verl,
    "verl:gspo": lambda: mean_of_means(*clipped(verl_A, 3e-4, 4e-4, s)),
    "verl:cispo": lambda: token_mean(*cispo(verl_A, 0.8, 1.2)),
    "verl:sapo": lambda: mean_of_means(*sapo(verl_A)),
    "verl:rloo": lambda: token_mean(
        *clipped(rows(G / (G - 1) * (R - mean)), 0.2, 0.2, rho, dual=3.0)
    ),
    "verl:reinforce++": lambda: token_mean(
        *clipped(verl_whiten(returns(r)), 0.2, 0.2, rho, dual=3.0)
    ),
    "verl:reinforce++-baseline": lambda: token_mean(
        *clipped(verl_whiten(rows(R - mean)), 0.2, 0.2, rho, dual=3.0)
    ),
    "verl:ppo": lambda: token_mean(*clipped(verl_whiten(gae()), 0.2, 0.2, rho, dual=3.0)),
    "trl:grpo": lambda: mean_of_means(*weighed(clipped(trl_A, 0.2, 0.2, rho), trl_w)),
    "trl:dapo": lambda: token_mean(*weighed(clipped(trl_A, 0.2, 0.2, rho), trl_w)),
    "trl:dr_grpo": lambda: constant(*weighed(clipped(rows(R - mean), 0.2, 0.2, rho), trl_w)),
    "trl:cispo": lambda: token_mean(*weighed(cispo(trl_A, -math.inf, 5.0), trl_w)),
    "trl:sapo": lambda: mean_of_means(*weighed(sapo(trl_A), trl_w)),
    "openrlhf:ppo": lambda: token_mean(*clipped(openrlhf_whiten(gae(kl1)), 0.2, 0.2, rho)),
    "openrlhf:reinforce++": lambda: token_mean(
        *clipped(openrlhf_whiten(returns(r, kl1)), 0.2, 0.2, rho)
    ),
    "openrlhf:reinforce++-baseline": lambda: token_mean(
        *clipped(openrlhf_whiten(returns((R - mean).ravel(), kl1)), 0.2, 0.2, rho)
    ),
    "openrlhf:rloo": lambda: token_mean(
        *clipped(returns(leave_one_out.ravel(), kl1), 0.2, 0.2, rho)
    ),
    "openrlhf:grpo": lambda: token_mean(
        *clipped(returns(((R - mean) / (std + 1e-9)).ravel(), kl1), 0.2, 0.2, rho)
    ),
    "openrlhf:dr_grpo": lambda: token_mean(
        *clipped(returns((R - mean).ravel(), kl1), 0.2, 0.2, rho)
    ),
    "openrlhf:tis": lambda: token_mean(
        *weighed(clipped(openrlhf_whiten(returns(r, kl1)), 0.2, 0.2, rho), np.clip(w, 0.5, 5.0))
    ),
    "nemo:grpo": nemo,
    "slime:grpo": lambda: mean_of_means(*clipped(verl_A, 0.2, 0.2, rho)),
    "slime:gspo": lambda: mean_of_means(*clipped(verl_A, 3e-4, 4e-4, s)),
    "areal:decoupled": areal,
    "skyrl:grpo": skyrl,
    "prime-rl:default": prime_rl,
    "roll:grpo": lambda: mean_of_means(*clipped(verl_A, 0.2, 0.2, rho)),
    "unirl:grpo": lambda: token_mean(
        *weighed(
            clipped(rows(leave_one_out / (r.std(ddof=1) + 1e-6)), 0.2, 0.28, rho, dual=3.0),
            np.minimum(w, 2.0),
        )
    ),
}


def algorithm(name: str) -> Algorithm:
    return replace(PRESETS[name].algorithm, norm_tokens=MAX_TOKENS)


@pytest.mark.parametrize("name", golden)
def test_a_preset_gives_its_systems_loss_and_gradient(name: str) -> None:
    want, slope = golden[name]()
    found = outcome(algorithm(name), BATCH)
    assert found.loss == pytest.approx(want, abs=1e-6)
    assert np.abs(found.gradient.numpy() - slope[M > 0]).max() < 1e-6
    assert np.abs(slope).max() > 1e-3


@pytest.mark.parametrize("name", ["trl:grpo", "trl:dapo", "trl:dr_grpo", "trl:sapo"])
def test_trls_kl_is_multiplied_by_the_ratio_to_the_policy_before_the_update(name: str) -> None:
    """use_bias_correction_kl of TRL >= 1.10: per_token_kl * coef_1, with gradient through both; the
    correction for the engine is not taken to it.
    """
    beta = 0.04
    k3 = np.exp(ref - new) - (ref - new) - 1
    kl, kl_slope = rho * k3, rho * (1 - np.exp(ref - new)) + rho * k3
    mean = {"trl:dapo": token_mean, "trl:dr_grpo": constant}.get(name, mean_of_means)
    plain, plain_slope = golden[name]()
    more, more_slope = mean(beta * kl, beta * kl_slope)
    found = outcome(replace(algorithm(name), kl_coef=beta), BATCH)
    assert found.loss == pytest.approx(plain + more, abs=1e-6)
    assert np.abs(found.gradient.numpy() - (plain_slope + more_slope)[M > 0]).max() < 1e-6
    direct = outcome(replace(algorithm(name), kl_coef=beta, kl_gradient="direct"), BATCH)
    assert np.abs((direct.gradient - found.gradient).numpy()).max() > 1e-3
    assert "gradient old_ratio" in describe(replace(algorithm(name), kl_coef=beta))


def test_every_preset_of_another_system_has_golden_numbers() -> None:
    ours = {name for name in PRESETS if name.startswith("unirl:")}
    assert set(PRESETS) - ours <= set(golden)
    assert DEFAULT in golden
    assert all(preset.source and preset.algorithm.name == name for name, preset in PRESETS.items())


def test_the_batch_of_the_golden_numbers_leaves_every_bound() -> None:
    inside = M > 0
    ratio, weight = rho[inside], w[inside]
    assert (ratio < 0.8).any() and (ratio > 1.28).any()
    assert (weight < 0.5).any() and (weight > 5).any()
    assert ((rho > 3) & (verl_A < 0) & inside).any() and (length > MAX_TOKENS).any()
    assert (trl_w == 0).any() and (trl_w > 0).any()


def group_scores(name: str, rewards: list[float]) -> list[float]:
    """Advantages of one group of one-token completions."""
    num = len(rewards)
    reward = torch.tensor(rewards, dtype=torch.float64)
    plain = replace(PRESETS[name].algorithm, kl_coef=0.0)
    found = advantages(
        plain,
        reward,
        torch.zeros(num, dtype=torch.int64),
        torch.ones(num),
        torch.ones(num),
        torch.arange(num),
    )
    return found.token.tolist()


def test_one_success_in_eight_is_what_was_measured_there() -> None:
    once = [1.0] + [0.0] * 7
    nemo_scores, verl_scores = group_scores("nemo:grpo", once), group_scores("verl:grpo", once)
    assert nemo_scores[0] == pytest.approx(1.0, abs=1e-6)
    assert nemo_scores[1] == pytest.approx(-0.378, abs=5e-4)
    assert sum(nemo_scores) == pytest.approx(-1.65, abs=5e-3)
    assert verl_scores[0] == pytest.approx(2.475, abs=5e-4)
    assert verl_scores[1] == pytest.approx(-0.354, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "want"),
    [("openrlhf:grpo", 1.49997), ("verl:grpo", 1.470588), ("trl:grpo", 0.5)],
)
def test_nearly_equal_rewards_show_which_epsilon_is_in_force(name: str, want: float) -> None:
    found = group_scores(name, [0.9, 0.9001, 0.9, 0.9])
    assert found[1] == pytest.approx(want, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "want"), [("verl:grpo", 0.7 / (1 + 1e-6)), ("verl:rloo", 0.7), ("trl:grpo", 0.0)]
)
def test_a_completion_alone_in_its_group_is_treated_as_there(name: str, want: float) -> None:
    assert group_scores(name, [0.7]) == pytest.approx([want])


def test_only_openrlhfs_tis_has_a_floor() -> None:
    old_logp, logp = torch.tensor([math.log(0.30)]), torch.tensor([0.0])
    for name, want in (("openrlhf:tis", 0.50), ("unirl:grpo", 0.30)):
        terms = PRESETS[name].algorithm
        weight = correction_weights(
            old_logp,
            logp,
            torch.ones(1),
            torch.zeros(1).long(),
            1,
            correction=terms.correction,
            low=terms.correction_low,
            high=terms.correction_high,
        )
        assert float(weight) == pytest.approx(want)


def test_dapos_penalty_is_capped_or_not() -> None:
    lengths = torch.tensor([80, 90, 100, 110])
    verl = PRESETS["verl:dapo"].algorithm
    assert overlong_penalty(verl, lengths, 100).tolist() == [0.0, -0.5, -1.0, -1.5]
    capped = replace(verl, overlong_capped=True)
    assert overlong_penalty(capped, lengths, 100).tolist() == [0.0, -0.5, -1.0, -1.0]
    assert not overlong_penalty(PRESETS["verl:grpo"].algorithm, lengths, 100).any()


def test_groups_with_equal_prompts_but_other_ids_never_merge() -> None:
    """An all-right and an all-wrong group of the same prompt: 0, where NeMo would give +-1.07."""
    reward = torch.tensor([1.0] * 4 + [0.0] * 4)
    options = {"baseline": "leave_one_out", "scale": "leave_one_out_std"}
    apart = group_advantages(reward, torch.arange(8) // 4, torch.ones(8), **options)
    merged = group_advantages(reward, torch.zeros(8).long(), torch.ones(8), **options)
    assert not apart.any()
    assert merged.abs().tolist() == pytest.approx([1.07] * 8, abs=5e-3)
