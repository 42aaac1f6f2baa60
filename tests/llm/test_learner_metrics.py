"""What the language learner reports is one mean over what it counts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.packed_groups import make_groups, make_model, plain_logp
from tests.llm.test_learner import batch_of, groups_with_rewards, make_learner
from unirl.learners.optimizer import OptimizerConfig
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.models.tiny import tiny_tokenizer
from unirl.llm.training.samples import sample_rows
from unirl.llm.training.token_batch import TokenBatch

STILL = OptimizerConfig(lr=1e-12)


def test_equal_rewards_are_found_equal_in_float32() -> None:
    groups = make_groups((3, [2] * 8), (3, [2] * 8))
    groups[0].reward.fill_(0.1)
    assert float(groups[0].reward.std()) > 0
    groups[1].reward[0] = 0.5
    metrics = make_learner().step(batch_of(groups)).flush()
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward_std"] == pytest.approx(float(groups[1].reward.std()) / 2)


def test_metrics_of_tokens_are_means_over_tokens_not_over_steps() -> None:
    """One step of the pass has 24 tokens, the other 2."""
    groups = make_groups((5, (12, 12)), (3, (1, 1)))
    for one in groups:
        one.reward[0] = 1.0
        one.logp.mul_(0.1).sub_(3.0)
    groups[1].logp.sub_(2.0)
    learner = make_learner(optimizer=STILL, minibatches=2)
    metrics = learner.step(batch_of(groups)).flush()
    logp, _ = plain_logp(make_model(), groups, temperature=0.7)
    apart = logp.detach() - torch.cat([one.logp for one in groups]).double()
    weight = apart.exp().clamp(max=2.0)
    found = {
        "sampling/sampling_logp_difference/mean": apart.abs().mean(),
        "sampling/kl": (apart.exp() - 1 - apart).mean(),
        "sampling/importance_sampling_ratio/mean": weight.mean(),
    }
    for name, want in found.items():
        assert metrics[name] == pytest.approx(float(want)), name


def test_kl_in_the_reward_is_reported() -> None:
    groups = groups_with_rewards()
    learner = make_learner(AlgorithmConfig(preset="openrlhf:rloo", kl_clamp=100.0))
    metrics = learner.step(batch_of(groups)).flush()
    policy, reference = make_model(), make_model()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)  # as make_learner has it
        apart = plain_logp(policy, groups, 0.7)[0] - plain_logp(reference, groups, 0.7)[0]
    assert metrics["kl"] == pytest.approx(float(apart.mean()), rel=1e-6)


def test_tokens_of_tools_have_no_version() -> None:
    groups = groups_with_rewards()
    for one in groups:
        one.version.fill_(2)
    groups[0].mask[1], groups[0].version[1] = False, -1
    groups[1].version[2] = 1
    learner = make_learner()
    learner.version = 3
    metrics = learner.step(batch_of(groups, 3)).flush()
    assert metrics["staleness/version_span"] == 1
    assert metrics["staleness/token_max"] == 2
    tokens = TokenBatch.of(groups, [1.0])
    rows = sample_rows(tokens, torch.zeros(tokens.mask.numel()), tiny_tokenizer(), 3)
    assert [row["versions"] for row in rows[:5]] == [[2], [2], [2], [2], [2]]
    assert rows[5]["versions"] == [1, 2]
