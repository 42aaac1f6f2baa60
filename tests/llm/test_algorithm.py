"""Claims about algorithms as learners call them: what a config resolves to, what is refused, that
no split of a batch matters, and that every one of them learns.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.commands.algorithms import algorithms
from unirl.errors import UniRLError
from unirl.llm.algorithms.advantages import Advantages, advantages
from unirl.llm.algorithms.algorithm import critic_loss, denominator, kl_loss, policy_terms
from unirl.llm.algorithms.batch_file import SavedBatch, example_batch, load_batch, save_batch
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.describe import describe, described_terms
from unirl.llm.algorithms.diff import difference, differing_terms, outcome
from unirl.llm.algorithms.effect import rules_of
from unirl.llm.algorithms.presets import DEFAULT, PRESETS
from unirl.llm.algorithms.resolve import check_group_size, resolve
from unirl.llm.algorithms.terms import Algorithm

every_preset = pytest.mark.parametrize("name", PRESETS)


def test_the_config_has_every_term_and_no_other() -> None:
    assert {item.name for item in fields(AlgorithmConfig)} == {"preset", *rules_of(Algorithm)}
    assert AlgorithmConfig().preset == DEFAULT
    assert not AlgorithmConfig().chosen()
    assert AlgorithmConfig(clip_low=0.1).chosen() == {"clip_low": 0.1}


@every_preset
def test_a_preset_alone_resolves_to_itself_and_describes_each_term(name: str) -> None:
    found = resolve(AlgorithmConfig(preset=name))
    assert found == PRESETS[name].algorithm
    assert len(describe(found).splitlines()) == len(described_terms(found)) == 6
    assert "e+" not in describe(found)


def test_what_is_set_replaces_the_presets_term_and_the_name_tells() -> None:
    found = resolve(AlgorithmConfig(preset="verl:grpo", clip_high=0.4))
    assert found == replace(PRESETS["verl:grpo"].algorithm, clip_high=0.4, changed=True)
    assert found.name == "verl:grpo+"
    same = resolve(AlgorithmConfig(preset="verl:grpo", clip_high=0.2))
    assert same.name == "verl:grpo"


@pytest.mark.parametrize(
    ("objective", "low", "high"),
    [("cispo", 1.0, 4.0), ("gspo", 3e-4, 4e-4), ("dppo", 0.2, 0.2)],
)
def test_another_objective_brings_its_own_bounds(objective: Any, low: float, high: float) -> None:
    found = resolve(AlgorithmConfig(objective=objective))
    assert (found.clip_low, found.clip_high, found.dual_clip) == (low, high, 0.0)
    set_by_hand = resolve(AlgorithmConfig(objective=objective, clip_high=0.5))
    assert (set_by_hand.clip_low, set_by_hand.clip_high) == (low, 0.5)


def test_another_correction_brings_its_own_bounds() -> None:
    found = resolve(AlgorithmConfig(correction="icepop"))
    assert (found.correction_low, found.correction_high) == (0.5, 5.0)
    none = resolve(AlgorithmConfig(advantage="vtrace"))
    assert none.correction == "none" and not none.weighs


def test_the_constant_of_dr_grpo_is_max_tokens_unless_set() -> None:
    assert resolve(AlgorithmConfig(preset="trl:dr_grpo"), max_tokens=64).norm_tokens == 64
    config = AlgorithmConfig(preset="trl:dr_grpo", norm_tokens=9)
    assert resolve(config, max_tokens=64).norm_tokens == 9
    batch = example_batch()
    with pytest.raises(ValueError, match="max_tokens"):
        outcome(resolve(AlgorithmConfig(preset="trl:dr_grpo")), batch)


def test_an_unknown_preset_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UniRLError, match='did you mean "openrlhf:rloo"'):
        resolve(AlgorithmConfig(preset="openrlfh:rlo"))


@pytest.mark.parametrize(
    "terms",
    [
        {"ratio": "behaviour", "correction": "tis"},
        {"advantage": "vtrace", "correction": "tis"},
        {"advantage": "vtrace", "ratio": "behaviour"},
        {"baseline": "none", "scale": "std"},
        {"correction": "icepop", "correction_low": 6.0},
        {"kl": "k1", "kl_coef": 0.1},
        {"kl_in": "reward", "kl_against": "behaviour"},
    ],
    ids=str,
)
def test_terms_that_contradict_each_other_are_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(UniRLError, match="contradicts itself"):
        resolve(AlgorithmConfig(**terms))


@pytest.mark.parametrize(
    "term", [{"clip_low": -0.1}, {"dual_clip": 0.5}, {"discount": 1.1}, {"tau_positive": 0.0}]
)
def test_values_out_of_range_are_refused_by_name(term: dict[str, float]) -> None:
    with pytest.raises(UniRLError, match=f"algorithm.{next(iter(term))}"):
        AlgorithmConfig(**term)  # type: ignore[arg-type]


def test_a_group_of_one_is_refused_where_the_group_is_the_baseline() -> None:
    for name, alone in (
        ("unirl:grpo", False),
        ("unirl:vtrace", False),
        ("openrlhf:reinforce++", True),
        ("verl:ppo", True),
        ("unirl:vtrace-critic", True),
    ):
        algorithm = PRESETS[name].algorithm
        check_group_size(algorithm, 2)
        if alone:
            check_group_size(algorithm, 1)
        else:
            with pytest.raises(UniRLError, match="at least 2"):
                check_group_size(algorithm, 1)


def test_what_an_algorithm_needs() -> None:
    needs = {
        name: (p.algorithm.needs_reference, p.algorithm.needs_critic, p.algorithm.needs_old_logp)
        for name, p in PRESETS.items()
    }
    assert needs["unirl:grpo"] == (False, False, True)
    assert needs["verl:ppo"] == (False, True, True)
    assert needs["openrlhf:ppo"] == (True, True, True)
    assert needs["nemo:grpo"] == (True, False, True)
    assert needs["prime-rl:default"] == (False, False, False)
    assert needs["unirl:vtrace-critic"] == (False, True, True)


def test_the_expected_gradient_of_kl_is_right_of_tokens_that_an_older_engine_drew() -> None:
    """Ten tokens in the proportions of the engine: their mean is the expectation."""
    drawn = torch.tensor([0, 1, 1, 1, 1, 1, 2, 2, 3, 3])
    engine = torch.tensor([0.1, 0.5, 0.2, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=torch.float64).log()
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64).requires_grad_()
    new = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits)
    for gradient, is_right in (("ratio", True), ("score", False)):
        algorithm = Algorithm(kl_coef=0.1, kl_gradient=gradient)  # type: ignore[arg-type]
        kl = kl_loss(
            algorithm,
            logits.log_softmax(-1)[drawn],
            engine[drawn],
            reference[drawn],
            torch.ones(10),
            torch.arange(10),
            10,
        )
        (found,) = torch.autograd.grad(kl.mean(), logits)
        assert torch.allclose(found, exact, atol=1e-12) == is_right


def test_the_penalty_of_long_completions_counts_what_tools_wrote_as_well() -> None:
    batch = example_batch()
    penalised = full("verl:dapo", batch)
    length = torch.bincount(batch.sequence)
    assert bool((~batch.mask)[length[batch.sequence] > 20].any())
    lost = torch.tensor([max(0.0, n - 0.8 * 24) / (0.2 * 24) for n in length.tolist()])
    by_hand = replace(batch, reward=batch.reward - lost.double())
    want = outcome(replace(penalised, overlong_share=0.0), by_hand)
    found = outcome(penalised, batch)
    assert found.loss == pytest.approx(want.loss, abs=1e-6)
    assert torch.allclose(found.gradient, want.gradient, atol=1e-6)


def full(name: str, batch: SavedBatch) -> Algorithm:
    return resolve(AlgorithmConfig(preset=name), max_tokens=batch.max_tokens)


def advantages_of(algorithm: Algorithm, batch: SavedBatch, mask: torch.Tensor) -> Advantages:
    return advantages(
        algorithm,
        batch.reward,
        batch.group,
        batch.valid,
        mask,
        batch.sequence,
        old_logp=batch.old_logp,
        logp=batch.logp,
        reference=batch.reference,
        value=batch.value,
        bootstrap=torch.zeros_like(batch.reward),
    )


@every_preset
def test_micro_batches_of_whole_completions_give_the_gradient_of_the_batch(name: str) -> None:
    batch = example_batch()
    algorithm = full(name, batch)
    shaped = resolve(AlgorithmConfig(preset=name, overlong_share=0.0), max_tokens=batch.max_tokens)
    want = outcome(shaped, batch)
    mask = batch.mask & batch.valid[batch.sequence]
    advantage = advantages_of(algorithm, batch, mask).token
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(1))
    parts = []
    for completions in order.split([5, 1, 20, 22]):
        rows = torch.cat([(batch.sequence == c).nonzero().squeeze(1) for c in completions])
        number = torch.empty(batch.num_sequences, dtype=torch.int64)
        number[completions] = torch.arange(completions.numel())
        where = (mask[rows], number[batch.sequence[rows]], completions.numel())
        parts.append((rows, where))
    total = sum(denominator(algorithm, *where) for _, where in parts)
    new = batch.new_logp.clone().requires_grad_()
    for rows, where in parts:
        old, logp = batch.old_logp[rows], batch.logp[rows]
        policy = policy_terms(algorithm, new[rows], old, logp, advantage[rows], *where)
        loss = policy.loss.numerator
        if algorithm.kl_coef and algorithm.kl_in == "loss":
            kl = kl_loss(algorithm, new[rows], logp, batch.reference[rows], *where)
            loss = loss + algorithm.kl_coef * kl.numerator
        (loss / total).backward()
    assert new.grad is not None
    assert torch.allclose(new.grad, want.gradient, atol=1e-14)
    assert want.gradient.abs().max() > 1e-4


@every_preset
def test_completions_without_a_reward_have_no_advantage_and_no_part_in_statistics(
    name: str,
) -> None:
    batch = example_batch()
    algorithm, lost = full(name, batch), ~batch.valid[batch.sequence]
    assert (batch.mask & lost).any()
    found = advantages_of(algorithm, batch, batch.mask).token
    assert (found[lost] == 0).all()
    without = advantages_of(algorithm, batch, batch.mask & ~lost).token
    torch.testing.assert_close(found, without)


@every_preset
def test_completions_without_advantage_can_be_skipped(name: str) -> None:
    """Left out of the forward pass but not of the denominator, they change no gradient."""
    batch = example_batch()
    algorithm = full(name, batch)
    if not algorithm.skips_zero_advantage:
        return
    mask = batch.mask & batch.valid[batch.sequence]
    found = advantages_of(algorithm, batch, mask)
    assert not found.active.all()  # the one without a reward, and groups of equal rewards
    total = denominator(algorithm, mask, batch.sequence, batch.num_sequences)
    gradients = []
    for rows in (mask, mask & found.active[batch.sequence]):
        new = batch.new_logp.clone().requires_grad_()
        found_terms = policy_terms(
            algorithm,
            new,
            batch.old_logp,
            batch.logp,
            found.token,
            rows,
            batch.sequence,
            batch.num_sequences,
        )
        gradients.append(torch.autograd.grad(found_terms.loss.numerator / total, new)[0])
    assert torch.equal(gradients[0], gradients[1])


def test_without_old_log_probs_the_update_is_the_only_one_of_its_batch() -> None:
    batch = example_batch()
    algorithm = full(DEFAULT, batch)
    where = (batch.mask, batch.sequence, batch.num_sequences)
    gradients = []
    for old in (None, batch.new_logp):
        new = batch.new_logp.clone().requires_grad_()
        found = policy_terms(algorithm, new, old, batch.logp, batch.value, *where)
        gradients.append(torch.autograd.grad(found.loss.mean(), new)[0])
        assert found.metrics.values()["losses/approx_kl"] == 0
    assert torch.equal(gradients[0], gradients[1])


def test_a_critic_learns_its_target_and_no_faster_than_the_clip() -> None:
    algorithm = replace(full("verl:ppo", example_batch()), value_clip=0.5)
    mask, sequence = torch.tensor([1, 1, 1, 0]), torch.zeros(4).long()
    value = torch.tensor([0.2, 2.0, 0.9, math.nan]).requires_grad_()
    loss = critic_loss(
        algorithm, value, torch.zeros(4), torch.tensor([1.0, 5.0, 0.0, 1.0]), mask, sequence, 1
    )
    want = 0.5 * (0.8**2 + 4.5**2 + 0.9**2) / 3
    assert loss.mean().item() == pytest.approx(want, rel=1e-6)
    (slope,) = torch.autograd.grad(loss.mean(), value)
    assert slope.tolist() == pytest.approx([-0.8 / 3, 0.0, 0.3, 0.0])


def test_what_is_missing_is_named() -> None:
    batch = example_batch()
    scores = (batch.reward, batch.group, batch.valid, batch.mask, batch.sequence)
    for name, missing in (("verl:ppo", "value"), ("unirl:vtrace", "old_logp")):
        with pytest.raises(ValueError, match=missing):
            advantages(full(name, batch), *scores)


# Batches as files, and the command.


def test_a_batch_survives_its_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="batches are safetensors files")
    batch = example_batch()
    save_batch(batch, tmp_path / "batch.safetensors")
    found = load_batch(tmp_path / "batch.safetensors")
    assert found.max_tokens == batch.max_tokens
    for item in fields(SavedBatch):
        if item.name != "max_tokens":
            assert torch.equal(getattr(found, item.name), getattr(batch, item.name))


def test_a_file_that_is_no_batch_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="batches are safetensors files")
    with pytest.raises(UniRLError, match="is missing"):
        load_batch(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello, I am not a batch of tokens")
    with pytest.raises(UniRLError, match="no batch of tokens"):
        load_batch(tmp_path / "text")


def test_the_command_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert algorithms([]) == 0
    text = "".join(capsys.readouterr().out.split())
    first_words = {name.partition(":")[0] for name in PRESETS}
    assert all(f"{word}:" in text for word in first_words)


def test_the_command_tells_one_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert algorithms(["nemo:grpo"]) == 0
    text = capsys.readouterr().out
    assert "std of the others" in text and "a reference model" in text


def test_the_command_says_what_differs_and_by_how_much(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("safetensors", reason="batches are safetensors files")
    save_batch(example_batch(), tmp_path / "b.safetensors")
    for more in ([], ["--batch", str(tmp_path / "b.safetensors")]):
        assert algorithms(["diff", "verl:grpo", "trl:dr_grpo", *more]) == 0
        text = capsys.readouterr().out
        assert "aggregation" in text and "seq-mean-token-sum-norm" in text
        found = difference(
            full("verl:grpo", example_batch()),
            full("trl:dr_grpo", example_batch()),
            example_batch(),
        )
        assert f"{found.cosine:.6f}" in text and f"{found.second.loss:.6g}" in text


def test_the_command_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UniRLError, match='did you mean "verl:grpo"'):
        algorithms(["diff", "verl:grppo", "trl:grpo"])
    with pytest.raises(UniRLError, match="not understood"):
        algorithms(["diff", "verl:grpo"])


def test_an_algorithm_differs_from_itself_in_nothing() -> None:
    batch = example_batch()
    one = full("verl:grpo", batch)
    found = difference(one, one, batch)
    assert not differing_terms(one, one)
    assert (found.cosine, found.factor, found.largest) == (pytest.approx(1.0), 1.0, 0.0)
