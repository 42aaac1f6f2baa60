"""What the learner shows of the tokens that it learned from is what it computed with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.packed_groups import make_groups, make_model, plain_logp
from tests.llm.test_learner import batch_of, groups_with_rewards, make_learner
from unirl.learners.optimizer import OptimizerConfig
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.models.tiny import tiny_tokenizer
from unirl.llm.training.samples import MAX_TOKENS, sample_rows, vocabulary
from unirl.llm.training.token_batch import TokenBatch

STILL = OptimizerConfig(lr=1e-12)


@pytest.mark.parametrize(
    "preset, settings",
    [("unirl:grpo", {}), ("unirl:grpo", {"minibatches": 2, "epochs": 2}), ("verl:ppo", {})],
)
def test_tokens_have_the_learners_log_probability_and_their_advantage(
    preset: str, settings: dict[str, Any]
) -> None:
    groups = groups_with_rewards()
    learner = make_learner(
        AlgorithmConfig(preset=preset), optimizer=STILL, tokenizer=tiny_tokenizer(),
        skip_zero=False, **settings,
    )  # fmt: skip
    before, _ = plain_logp(make_model(), groups, temperature=0.7)
    learner.step(batch_of(groups))
    rows = learner.take_samples()
    assert learner.take_samples() == []
    shown = {name: [v for row in rows for v in row["each"][name]] for name in rows[0]["each"]}
    assert shown["token"] == torch.cat([one.token for one in groups]).tolist()
    assert shown["logp"] == pytest.approx(
        torch.cat([one.logp for one in groups]).tolist(), abs=1e-4
    )
    drawn = torch.cat([one.mask for one in groups])
    assert shown["drawn"] == drawn.int().tolist() and drawn.any()
    found = torch.tensor([float("nan") if v is None else v for v in shown["new_logp"]])
    assert torch.allclose(found[drawn].double(), before[drawn].double(), atol=1e-4)
    for row in rows:
        mean = sum(row["each"]["advantage"]) / len(row["each"]["advantage"])
        assert mean == pytest.approx(row["advantage"], abs=1e-3)
    assert [row["place"] for row in rows[:3]] == [0, 1, 2]


def test_tokens_without_a_forward_pass_have_no_log_probability_of_the_learner() -> None:
    groups = make_groups((3, (2, 2)), (3, (2, 2)))
    groups[0].reward.fill_(1.0)  # all alike: nothing to learn
    groups[1].reward[0] = 1.0
    learner = make_learner(optimizer=STILL, tokenizer=tiny_tokenizer())
    learner.step(batch_of(groups))
    rows = learner.take_samples()
    assert [None in row["each"]["new_logp"] for row in rows] == [True, True, False, False]


def test_tokens_of_groups_that_taught_something_come_first_and_are_bounded() -> None:
    groups = make_groups((3, [MAX_TOKENS // 2] * 2), (3, [MAX_TOKENS // 2 + 100] * 3))
    tokens = TokenBatch.of(groups, [1.0])
    advantage = torch.zeros(tokens.mask.numel())
    advantage[MAX_TOKENS:] = 1.0
    rows = sample_rows(tokens, advantage, tiny_tokenizer(), 3)
    sizes = [len(row["each"]["token"]) if "each" in row else 0 for row in rows]
    assert sizes == [0, 0, MAX_TOKENS // 2 + 100, MAX_TOKENS // 2 - 100, 0]


def test_the_vocabulary_spells_every_token() -> None:
    tokenizer = tiny_tokenizer()
    texts = vocabulary(tokenizer)
    assert len(texts) == len(tokenizer)
    ids = tokenizer("12+30=42")["input_ids"]
    assert "".join(texts[token] for token in ids) == tokenizer.decode(ids)
