"""A completion that was cut off is worth what the critic says of its whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.packed_groups import make_model
from tests.llm.test_learner import close, groups_with_rewards, make_learner, moved
from tests.vtrace.token_reference import slow_token_gae
from unirl.llm.algorithms.advantages import advantages
from unirl.llm.algorithms.batch_file import example_batch
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.resolve import resolve
from unirl.llm.group import FINISHES

DISCOUNT, LAMBDA, COEF = 0.95, 0.9, 0.7
TERMS = AlgorithmConfig(
    preset="verl:ppo",
    critic="head",
    whiten="none",
    bootstrap=True,
    discount=DISCOUNT,
    gae_lambda=LAMBDA,
    value_coef=COEF,
    value_clip=0.0,
)


@pytest.mark.parametrize("settings", [{}, {"share_prompt": False}, {"micro_tokens": 12}], ids=str)
def test_the_gradient_is_that_of_gae_with_the_critics_value_after_the_cut(
    settings: dict[str, Any],
) -> None:
    """Ratios are 1, so each token adds -A grad logp, and COEF / 2 (value - target)^2."""
    groups = groups_with_rewards()
    first = groups[0]
    first.mask[int(first.starts[2]) - 1] = False  # a tool had the last word before the cut
    learner = make_learner(TERMS, **settings)
    start: Any = learner.state_dict().model
    weight = start["critic.weight"].clone().requires_grad_()
    bias = start["critic.bias"].clone().requires_grad_()
    found = moved(learner, groups)

    model = make_model().requires_grad_(True)
    loss, num, num_cut = torch.zeros((), dtype=torch.float64), 0, 0
    for one in groups:
        for i in range(one.size):
            begin, end = int(one.starts[i]), int(one.starts[i + 1])
            ids = torch.cat([one.prompt, one.token[begin:end]]).long()[None]
            out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
            before = one.prompt.numel() - 1
            logp = (out.logits[0, before:-1] / 0.7).log_softmax(1)
            logp = logp.gather(1, ids[0, before + 1 :, None])[:, 0]
            value = (out.hidden_states[-1][0, before:] @ weight.T + bias)[:, 0]
            mask = one.mask[begin:end]
            paid = torch.zeros(end - begin, dtype=torch.float64)
            paid[int(mask.nonzero()[-1])] = one.reward[i, 0].double()
            cut_off = FINISHES[int(one.finish[i])] == "length"
            advantage = torch.tensor(
                slow_token_gae(
                    paid.tolist(),
                    value[:-1].tolist(),
                    mask.tolist(),
                    [0] * (end - begin),
                    discount=DISCOUNT,
                    lambda_=LAMBDA,
                    bootstrap=[value[-1].item() if cut_off else 0.0],
                ),
                dtype=torch.float64,
            )
            error = value[:-1] - (advantage + value[:-1].detach())
            terms = -advantage * logp + COEF / 2 * error.square()
            loss = loss + terms[mask].sum()
            num, num_cut = num + int(mask.sum()), num_cut + cut_off
    assert num_cut == 4
    (loss / num).backward()
    wanted = {f"model.{name}": -p.grad for name, p in model.named_parameters()}
    wanted |= {"critic.weight": -weight.grad, "critic.bias": -bias.grad}  # type: ignore[operator]
    close(found, wanted, 1e-6)  # epsilon of the optimiser; rewards are in float32


def test_an_algorithm_that_bootstraps_does_not_take_silence_for_the_end() -> None:
    batch = example_batch()
    with pytest.raises(ValueError, match="bootstrap is missing"):
        advantages(
            resolve(AlgorithmConfig(preset="unirl:vtrace-critic")),
            batch.reward,
            batch.group,
            batch.valid,
            batch.mask,
            batch.sequence,
            old_logp=batch.old_logp,
            logp=batch.logp,
            value=batch.value,
        )
