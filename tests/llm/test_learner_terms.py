"""Critics by what their loss changes, and completions that have no loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.test_learner import PLAIN, batch_of, close, groups_with_rewards, make_learner, moved
from unirl.errors import UniRLError
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.learner_config import CriticConfig

SAME_STEPS = {"critic": CriticConfig(lr=PLAIN.lr)}


def learner_of(critic: str, **terms: Any) -> Any:
    return make_learner(
        AlgorithmConfig(preset="verl:ppo", critic=critic, **terms),  # type: ignore[arg-type]
        **SAME_STEPS,
    )


def of(moves: dict[str, torch.Tensor], begin: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(begin): v for k, v in moves.items() if k.startswith(begin)}


def test_only_a_head_whose_states_are_attached_changes_the_policy() -> None:
    """Values begin alike, so advantages do; what differs is where the critic's gradient goes."""
    groups = groups_with_rewards()
    policy = of(moved(learner_of("head", value_coef=0.0), groups), "model.")
    both = of(moved(learner_of("head"), groups), "model.")
    detached, own = moved(learner_of("detached"), groups), moved(learner_of("model"), groups)
    close(of(detached, "model."), policy, 1e-9)
    close(of(own, "model."), policy, 1e-9)
    assert float(detached["critic.weight"].abs().max()) > 0
    # The model of its own gets what the head would have given the policy's.
    critic = of(own, "critic_model/model.")
    close({k: policy[k] + critic[k] for k in policy}, both, 1e-9)


def test_a_critics_model_is_in_the_checkpoint_and_continues_from_it() -> None:
    first, second = groups_with_rewards(), groups_with_rewards(1)
    one = learner_of("model")
    one.step(batch_of(first))
    saved = one.state_dict()
    other = learner_of("model")
    other.load_state_dict(saved)
    other.version = 1
    with torch.no_grad():
        assert "critic" in saved.optimizer
    close(moved(one, second), moved(other, second), 1e-12)


@pytest.mark.parametrize(("saved", "now"), [("head", "model"), ("model", "head")])
def test_a_checkpoint_with_another_critic_is_refused_with_what_fits(saved: str, now: str) -> None:
    state = learner_of(saved).state_dict()
    with pytest.raises(UniRLError, match=f"resume with --algorithm.critic {saved}"):
        learner_of(now).load_state_dict(state)


@pytest.mark.parametrize(
    ("preset", "over_tokens"), [("trl:dapo", True), ("trl:grpo", False), ("trl:dr_grpo", False)]
)
def test_what_was_cut_off_has_no_loss_and_counts_in_its_group(
    preset: str, over_tokens: bool
) -> None:
    """By hand, as TRL's mask_truncated_completions: at the first step every ratio is 1."""
    groups = groups_with_rewards()
    total = tokens = 0.0
    for group in groups:
        reward = group.reward[:, 0].double()
        advantage = reward - reward.mean()
        if preset != "trl:dr_grpo":
            advantage = advantage / (reward.std() + 1e-4)
        for i, (one, end) in enumerate(zip(group.starts, group.starts[1:], strict=False)):
            drawn = float(group.mask[int(one) : int(end)].sum())
            if i != 1 and drawn:  # the second of each group was cut off
                weight = drawn if over_tokens else 1.0
                weight = drawn / 16 if preset == "trl:dr_grpo" else weight
                total, tokens = total - float(advantage[i]) * weight, tokens + drawn
    below = tokens if over_tokens else float(sum(group.size for group in groups))
    config = AlgorithmConfig(preset=preset, correction="none", mask_truncated=True)
    row = make_learner(config).step(batch_of(groups)).flush()
    assert row["losses/policy"] == pytest.approx(total / below, abs=1e-6)
    plain = AlgorithmConfig(preset=preset, correction="none")
    other = make_learner(plain).step(batch_of(groups)).flush()
    assert abs(other["losses/policy"] - row["losses/policy"]) > 1e-3
