"""The language learner's gradient is that of the formulas, however a batch is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.packed_groups import make_groups, make_model
from unirl.core.sample import Batch, Slot
from unirl.core.training_budget import TrainingBudget
from unirl.core.tree import flatten
from unirl.errors import UniRLError
from unirl.learners.optimizer import OptimizerConfig
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.resolve import resolve
from unirl.llm.group import FINISHES, Group, GroupShape
from unirl.llm.learner_config import LlmLearnerConfig
from unirl.llm.training.language_policy import Critic, LanguagePolicy
from unirl.llm.training.learner import LlmLearner

# Not a step of Adam, which divides by what is to be compared: weights move by minus the gradient.
PLAIN = OptimizerConfig(name="rmsprop", lr=1e6, epsilon=1e12, max_grad_norm=1e9)
SIZES = ((5, (4, 7, 1, 3)), (3, (2, 2, 6, 5)), (8, (1, 9, 3, 3)), (2, (4, 4, 4, 4)))


def groups_with_rewards(seed: int = 0) -> list[Group]:
    """Four groups of four; all rewards of the third are equal, the second completion of each was
    cut off.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = make_groups(*SIZES, seed=seed)
    for i, one in enumerate(groups):
        one.reward.copy_(torch.rand((4, 1), generator=generator).round(decimals=1))
        one.logp.sub_(3.0)
        one.finish[1] = FINISHES.index("length")
        if i == 2:
            one.reward.fill_(0.4)
    return groups


def batch_of(groups: Sequence[Group], version: int = 0) -> Batch:
    """As a queue would hand them out."""
    shape = GroupShape(groups[0].size, 8, 16)
    slots = []
    for i, one in enumerate(groups):
        data = shape.spec().allocate()
        begin, end = one.prompt.numel(), one.prompt.numel() + one.token.numel()
        data["token"][:begin], data["token"][begin:end] = one.prompt, one.token
        for name in ("logp", "mask", "version"):
            data[name][begin:end] = getattr(one, name)
        data["starts"].copy_(one.starts + begin)
        for name in ("finish", "reward", "outcome"):
            data[name].copy_(getattr(one, name))
        slots.append(Slot(i, one.ticket, data, 0, version, version))
    return Batch(slots, version)


def make_learner(
    algorithm: AlgorithmConfig | None = None, *, dtype: Any = torch.float64, **settings: Any
) -> LlmLearner:
    skip_zero = settings.pop("skip_zero", True)
    optimizer = settings.pop("optimizer", PLAIN)
    prepare = settings.pop("prepare", None)
    budget = settings.pop("budget", TrainingBudget(1000))
    others = {
        name: settings.pop(name)
        for name in ("ranks", "teacher", "critic", "credit", "tokenizer")
        if name in settings
    }
    resolved = resolve(algorithm or AlgorithmConfig(), max_tokens=16)
    model = settings.pop("model", None) or make_model(dtype=dtype).requires_grad_(True)
    own = resolved.needs_critic and resolved.critic == "model"
    policy = LanguagePolicy(
        model,
        temperature=0.7,
        critic=resolved.needs_critic and not own,
        detached=resolved.critic == "detached",
        own_critic=Critic(make_model(dtype=dtype).requires_grad_(True)) if own else None,
    )
    for head in policy.critic, policy.own_critic and policy.own_critic.head:
        if head is not None:
            # Not zero, as it begins: a value that is asked for in vain would not show.
            torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(4))
    reference = None
    if resolved.needs_reference:
        other = make_model(dtype=dtype)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        reference = LanguagePolicy(other, temperature=0.7)
    policy.to(dtype)
    if policy.own_critic is not None:
        policy.own_critic.to(dtype)
    if prepare is not None:
        for each in (policy, reference):
            if each is not None:
                prepare(each)
    return LlmLearner(
        policy,
        resolved,
        LlmLearnerConfig(optimizer=optimizer, **settings),
        reward_weights={"test": 1.0},
        max_tokens=16,
        skip_zero=skip_zero,
        budget=budget,
        seed=3,
        reference=reference,
        **others,
    )


def moved(learner: LlmLearner, *batches: Sequence[Group]) -> dict[str, Tensor]:
    """How far the weights went."""
    before = {name: value.clone() for name, value in flatten(learner.state_dict().model).items()}
    for groups in batches:
        learner.step(batch_of(groups, learner.version))
    after = flatten(learner.state_dict().model)
    return {name: after[name] - value for name, value in before.items()}


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    scale = max(float(value.abs().max()) for value in one.values())
    assert scale > 1e-4
    for name, value in one.items():
        assert (value - other[name]).abs().max() <= tolerance * scale, name


ALGORITHMS = {
    "unirl:grpo": AlgorithmConfig(),
    "seq means": AlgorithmConfig(preset="trl:grpo", entropy_coef=0.01),
    "GSPO": AlgorithmConfig(preset="verl:gspo"),
    "KL in the loss": AlgorithmConfig(kl_coef=0.1, kl="k3"),
    "KL in the reward": AlgorithmConfig(preset="openrlhf:reinforce++"),
    "critic": AlgorithmConfig(preset="verl:ppo", critic="head"),
    "critic of its own": AlgorithmConfig(preset="verl:ppo"),
    "V-trace": AlgorithmConfig(preset="unirl:vtrace"),
    "V-trace, bootstrapped": AlgorithmConfig(preset="unirl:vtrace-critic"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_does_not_depend_on_how_the_batch_is_divided(name: str) -> None:
    groups = groups_with_rewards()
    whole = moved(make_learner(ALGORITHMS[name], micro_tokens=10_000), groups)
    divided = moved(make_learner(ALGORITHMS[name], micro_tokens=12), groups)
    close(whole, divided, 1e-9)
    backwards = moved(make_learner(ALGORITHMS[name]), groups[::-1])
    close(whole, backwards, 1e-9)
    apart = moved(make_learner(ALGORITHMS[name], share_prompt=False), groups)
    close(whole, apart, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_spread_may_be_left_out(dtype: torch.dtype) -> None:
    groups = groups_with_rewards()
    skipped = moved(make_learner(skip_zero=True, dtype=dtype), groups)
    computed = moved(make_learner(skip_zero=False, dtype=dtype), groups)
    close(skipped, computed, 1e-5 if dtype == torch.float32 else 1e-12)


def test_the_gradient_is_that_of_the_formula() -> None:
    """unirl:grpo on one update: ratios are 1, so each token adds -A w grad logp."""
    groups = groups_with_rewards()
    found = moved(make_learner(), groups)
    model = make_model().requires_grad_(True)
    rewards = torch.cat([one.reward[:, 0].double() for one in groups])
    loss, num = torch.zeros((), dtype=torch.float64), 0
    for one in groups:
        reward = one.reward[:, 0].double()
        for i in range(one.size):
            others = torch.cat([reward[:i], reward[i + 1 :]])
            gain = (reward[i] - others.mean()) / (rewards.std() + 1e-6)
            begin, end = int(one.starts[i]), int(one.starts[i + 1])
            tokens = torch.cat([one.prompt, one.token[begin:end]]).long()
            logits = model(tokens[None]).logits[0, len(one.prompt) - 1 : -1] / 0.7
            logp = logits.log_softmax(1).gather(1, tokens[len(one.prompt) :, None])[:, 0]
            weight = (logp.detach() - one.logp[begin:end].double()).exp().clamp(max=2.0)
            loss = loss - (gain * weight * logp).sum()
            num += end - begin
    (loss / num).backward()
    wanted = {f"model.{name}": -value.grad for name, value in model.named_parameters()}
    close(found, wanted, 1e-6)  # epsilon of the optimiser


def test_the_step_size_falls_with_the_training_time_where_that_ends_first() -> None:
    optimizer = OptimizerConfig(lr=0.01, lr_schedule="linear")
    learner = make_learner(optimizer=optimizer, budget=TrainingBudget(10**9, max_seconds=10.0))
    learner.record_training_seconds(5.0)
    row = learner.step(batch_of(groups_with_rewards())).flush()
    assert row["losses/learning_rate"] == pytest.approx(0.005)


def test_a_completion_whose_reward_failed_takes_no_part() -> None:
    groups = groups_with_rewards()
    groups[0].outcome[1, 0] = 2
    groups[0].reward[1, 0] = 77.0
    found = moved(make_learner(), groups)
    first = groups[0]
    keep = [0, 2, 3]
    pieces = [slice(int(first.starts[i]), int(first.starts[i + 1])) for i in keep]
    without = replace(
        first,
        **{
            name: torch.cat([getattr(first, name)[piece] for piece in pieces])
            for name in ("token", "logp", "mask", "version")
        },
        **{name: getattr(first, name)[keep] for name in ("finish", "reward", "outcome")},
        starts=torch.tensor([0, *(int(first.lengths[i]) for i in keep)]).cumsum(0).int(),
    )
    learner = make_learner()
    batch = batch_of(groups[1:])
    slot = batch_of([groups[0]]).slots[0]
    data = GroupShape(3, 8, 16).spec().allocate()
    begin, end = without.prompt.numel(), without.prompt.numel() + without.token.numel()
    data["token"][:begin], data["token"][begin:end] = without.prompt, without.token
    for name in ("logp", "mask", "version"):
        data[name][begin:end] = getattr(without, name)
    data["starts"].copy_(without.starts + begin)
    for name in ("finish", "reward", "outcome"):
        data[name].copy_(getattr(without, name))
    slot.data = data
    before = {name: value.clone() for name, value in learner.state_dict().model.items()}  # type: ignore[union-attr,operator]
    learner.step(Batch([slot, *batch.slots], 0))
    after: Any = learner.state_dict().model
    close(found, {name: after[name] - value for name, value in before.items()}, 1e-9)


def test_several_passes_are_clipped_around_the_policy_before_the_batch() -> None:
    settings = {"optimizer": OptimizerConfig(lr=0.05, max_grad_norm=1e9), "epochs": 6}
    learner = make_learner(AlgorithmConfig(correction="none"), minibatches=2, **settings)
    metrics = learner.step(batch_of(groups_with_rewards())).flush()
    assert metrics["clip_ratio/high_mean"] > 0.05
    assert metrics["losses/approx_kl"] > 1e-3
    assert learner.version == 1 and learner.num_steps == 16


@pytest.mark.parametrize("preset", ["unirl:grpo", "prime-rl:default"])
def test_an_adaptive_step_size_follows_how_far_each_pass_moved_the_policy(preset: str) -> None:
    """The second algorithm needs no log-probabilities from before the batch for its loss."""

    def run(target_kl: float) -> dict[str, float]:
        optimizer = OptimizerConfig(lr=0.003, lr_schedule="adaptive", target_kl=target_kl)
        learner = make_learner(AlgorithmConfig(preset=preset), optimizer=optimizer, epochs=2)
        return learner.step(batch_of(groups_with_rewards())).flush()

    # Half of the tokens that are counted are those of the first pass, before anything moved.
    moved_by = 2 * run(1.0)["losses/approx_kl"]
    assert moved_by > 1e-5
    for target, lr in ((0.49, 0.002), (0.51, 0.003), (1.99, 0.003), (2.01, 0.0045)):
        assert run(target * moved_by)["losses/learning_rate"] == pytest.approx(lr)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"minibatches": 1}, "it is 1"),
        ({"minibatches": 2, "lr": 1e-6}, "an adaptive step size stays within 1e-05 .. 0.01"),
    ],
)
def test_an_adaptive_step_size_that_could_not_follow_is_refused(
    config: dict[str, Any], what: str
) -> None:
    optimizer = OptimizerConfig(lr=config.pop("lr", 1e-4), lr_schedule="adaptive")
    with pytest.raises(UniRLError, match=what):
        LlmLearnerConfig(optimizer=optimizer, **config)


def test_an_objective_without_a_ratio_is_refused_where_a_batch_gives_several_steps() -> None:
    for settings in ({"epochs": 2}, {"minibatches": 2}):
        with pytest.raises(UniRLError, match="must be 1, it is 2"):
            make_learner(AlgorithmConfig(preset="unirl:vtrace"), **settings)


def test_a_batch_that_teaches_nothing_leaves_the_weights_alone() -> None:
    groups = groups_with_rewards()
    for one in groups:
        one.reward.fill_(1.0)
    learner = make_learner(optimizer=OptimizerConfig(lr=0.1))
    learner.step(batch_of(groups_with_rewards()))  # Adam has momentum now
    before = {name: value.clone() for name, value in learner.weights().items()}
    metrics = learner.step(batch_of(groups, 1)).flush()
    assert metrics["losses/empty_steps"] == 1 and metrics["frac_reward_zero_std"] == 1.0
    assert all(torch.equal(value, learner.weights()[name]) for name, value in before.items())
    assert learner.version == 2


@pytest.mark.parametrize("name", ["unirl:grpo", "critic", "KL in the loss"])
def test_a_restored_learner_continues_bit_for_bit(name: str) -> None:
    settings: dict[str, Any] = {"optimizer": OptimizerConfig(lr=0.01), "minibatches": 2}
    batches = [groups_with_rewards(seed) for seed in range(4)]
    learner = make_learner(ALGORITHMS[name], dtype=torch.float32, **settings)
    for groups in batches[:2]:
        learner.step(batch_of(groups, learner.version))
    state = learner.state_dict()
    saved = type(state)(
        {key: value.clone() for key, value in state.model.items()},  # type: ignore[union-attr,operator]
        {
            "update": {
                key: {part: tensor.clone() for part, tensor in tensors.items()}  # type: ignore[union-attr]
                for key, tensors in state.optimizer["update"].items()  # type: ignore[index,union-attr,call-overload]
            },
            "generator": state.optimizer["generator"].clone(),  # type: ignore[index,union-attr,operator,call-overload]
        },
        dict(state.counters),
    )
    again = make_learner(ALGORITHMS[name], dtype=torch.float32, **settings)
    again.load_state_dict(saved)
    again.version, again.num_steps = learner.version, learner.num_steps
    for groups in batches[2:]:
        learner.step(batch_of(groups, learner.version))
        again.step(batch_of(groups, again.version))
    for key, value in learner.state_dict().model.items():  # type: ignore[union-attr]
        assert torch.equal(value, again.state_dict().model[key]), key  # type: ignore[index,arg-type]
    assert again.recent_returns == learner.recent_returns


def test_bfloat16_gradients_add_up_in_full_precision() -> None:
    groups = groups_with_rewards()
    whole = moved(make_learner(dtype=torch.bfloat16, micro_tokens=10_000), groups)
    divided = moved(make_learner(dtype=torch.bfloat16, micro_tokens=12), groups)
    exact = moved(make_learner(dtype=torch.float32), groups)
    norm = math.sqrt(sum(float(value.square().sum()) for value in exact.values()))
    for found in (whole, divided):
        wrong = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        assert math.sqrt(wrong) < 0.1 * norm
