"""The IMPALA learner against a loss written out by hand, and its settings."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from unirl.actors.vector import ActorConfig, unroll_spec
from unirl.core.errors import UniRLError
from unirl.core.sample import Batch, SampleSpec, Slot
from unirl.learners.impala import ImpalaLearner, ImpalaLearnerConfig, _whiten
from unirl.learners.update import OptimizerConfig
from unirl.policy import Policy, PolicyConfig
from unirl.vtrace.reference import slow_vtrace_targets

LENGTH, NUM_ENVS = 5, 4
SPACES = (Box(-1, 1, (3,), np.float32), Discrete(3))


def random_slot(spec: SampleSpec, seed: int, version: int = 0) -> Slot:
    generator = torch.Generator().manual_seed(seed)
    data = spec.allocate()
    shape = (LENGTH, NUM_ENVS)
    data["obs"].uniform_(-1, 1, generator=generator)
    data["action"].random_(0, 3, generator=generator)
    data["logp"].uniform_(-2, -0.5, generator=generator)
    data["reward"].normal_(generator=generator)
    data["terminated"].copy_(torch.rand(shape, generator=generator) < 0.2)
    data["mask"][1:] = ~data["terminated"][:-1]  # the row after an end is a filler
    data["terminated"] &= data["mask"]
    return Slot(seed, seed, data, first_version=version, last_version=version)


def make(
    batch_size: int = 1, core: str = "none", **settings: Any
) -> tuple[ImpalaLearner, Policy, SampleSpec]:
    policy = Policy(*SPACES, PolicyConfig(hidden=(8,), core=core, core_size=4), seed=3)  # type: ignore[arg-type]
    spec = unroll_spec(*SPACES, ActorConfig(1, NUM_ENVS, LENGTH), policy.initial_state(1))
    config = ImpalaLearnerConfig(optimizer=OptimizerConfig(max_grad_norm=1e9), **settings)
    return (
        ImpalaLearner(policy, spec, config, batch_size=batch_size, total_steps=1000, seed=0),
        policy,
        spec,
    )


def test_the_loss_is_the_papers() -> None:
    learner, policy, spec = make(gamma=0.9, entropy_coef=0.03, value_coef=0.7)
    slot = random_slot(spec, 1)
    data, mask = slot.data, slot.data["mask"]
    unroll = policy.unroll(data["obs"], {}, None)
    new_logp = unroll.distribution[:-1].log_prob(data["action"])
    target, advantage = slow_vtrace_targets(
        (new_logp - data["logp"]).detach().double(),
        0.9 * (~data["terminated"]).double(),
        data["reward"].double(),
        unroll.value.detach().double(),
        mask=mask,
    )[:2]
    count = mask.sum()
    policy_loss = -(new_logp * advantage.float())[mask].sum() / count
    value = 0.5 * (unroll.value[:-1] - target.float())[mask].square().sum() / count
    entropy = unroll.distribution[:-1].entropy()[mask].sum() / count
    loss = policy_loss + 0.7 * value - 0.03 * entropy
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    metrics = learner.step(Batch([slot], 0)).flush()
    assert metrics["losses/policy"] == pytest.approx(policy_loss.item(), rel=1e-4)
    assert metrics["losses/value"] == pytest.approx(value.item(), rel=1e-4)
    assert metrics["losses/entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    # Coefficients and signs show in the gradient alone.
    assert metrics["losses/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_steps_count_environment_steps_without_fillers() -> None:
    learner, _, spec = make()
    slot = random_slot(spec, 1)
    assert not slot.data["mask"].all()
    learner.step(Batch([slot], 0))
    assert (learner.version, learner.num_steps) == (1, int(slot.data["mask"].sum()))


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_two_slots_give_the_gradient_of_one_batch_of_both(core: str) -> None:
    learner, policy, spec = make(batch_size=2, core=core)
    slots = [random_slot(spec, 1), random_slot(spec, 2)]
    learner.step(Batch(slots, 0))
    other, twin, _ = make(batch_size=2, core=core)
    other.step(Batch(list(reversed(slots)), 0))
    for a, b in zip(policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_a_filler_row_holds_changes_nothing() -> None:
    results = []
    for junk in (0.0, 1e6):
        learner, policy, spec = make()
        slot = random_slot(spec, 1)
        filler = ~slot.data["mask"]
        assert filler.any()
        slot.data["reward"][filler] = junk
        slot.data["logp"][filler] = -junk / 1e5
        learner.step(Batch([slot], 0))
        results.append([parameter.clone() for parameter in policy.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_epochs_and_minibatches_learn_more_from_a_batch() -> None:
    learner, policy, spec = make(batch_size=2, epochs=3, minibatches=4)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    learner.step(Batch([random_slot(spec, 1), random_slot(spec, 2)], 0))
    assert learner.version == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    optimizer: Any = learner.state_dict().optimizer
    assert {int(item["step"]) for item in optimizer["update"].values()} == {3 * 4}


def test_a_batch_that_does_not_split_is_refused_with_the_nearest_that_does() -> None:
    with pytest.raises(UniRLError, match="8 environments does not split into 3") as error:
        make(batch_size=2, minibatches=3)
    assert "minibatches 4" in error.value.remedy or "minibatches 2" in error.value.remedy


@pytest.mark.parametrize(
    "wrong",
    [
        {"gamma": 1.5},
        {"lambda_": -0.1},
        {"epochs": 0},
        {"minibatches": 0},
        {"rho_clip": -1.0},
        {"c_clip": float("nan")},
        {"reward_clip": -1.0},
        {"device": "foo"},
        {"entropy_coef": -1.0},
    ],
)
def test_settings_that_break_a_rule_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UniRLError):
        ImpalaLearnerConfig(**wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_the_learner_on_cuda_does_what_it_does_on_the_cpu_and_resumes(name: str) -> None:
    settings: dict[str, Any] = {"normalize_reward": True, "minibatches": 2, "epochs": 2}
    optimizer = OptimizerConfig(name=name, lr=1e-3)  # type: ignore[arg-type]
    learners = []
    for device in ("cpu", "cuda"):
        config = PolicyConfig(hidden=(8,), core="lstm", core_size=4, normalize_obs=True)
        policy = Policy(*SPACES, config, seed=3)
        spec = unroll_spec(*SPACES, ActorConfig(1, NUM_ENVS, LENGTH), policy.initial_state(1))
        learner_config = ImpalaLearnerConfig(device=device, optimizer=optimizer, **settings)
        make_one = partial(ImpalaLearner, batch_size=1, total_steps=1000, seed=0)
        learners.append(make_one(policy, spec, learner_config))
    for step in range(3):
        for learner in learners:
            learner.step(Batch([random_slot(spec, step)], step)).flush()
    cpu, cuda = (learner.weights() for learner in learners)
    for key, value in cpu.items():
        torch.testing.assert_close(value, cuda[key].cpu(), rtol=1e-3, atol=1e-4)
    saved = learners[1].state_dict()
    learners[0].load_state_dict(saved)  # a checkpoint of a GPU continues on a CPU
    learners[0].step(Batch([random_slot(spec, 9)], 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_that_is_asked_for_and_absent_is_an_error() -> None:
    with pytest.raises(UniRLError, match="CUDA"):
        make(device="cuda")


def test_whitened_advantages_are_the_usual_ones_on_policy_and_nothing_where_the_policy_left() -> (
    None
):
    torch.manual_seed(0)
    advantage, mask = torch.randn(5, 4) * 3 + 2, torch.ones(5, 4, dtype=torch.bool)
    mask[2] = False
    advantage[2] = 0.0
    kept = advantage[mask]
    on_policy = _whiten(advantage, torch.zeros(5, 4), mask, 1.0)
    torch.testing.assert_close(on_policy[mask], (kept - kept.mean()) / kept.std(unbiased=False))
    assert not on_policy[2].any()
    log_rho = torch.zeros(5, 4)
    log_rho[0] = -30.0
    left = _whiten(advantage * log_rho.exp(), log_rho, mask, 1.0)
    assert left[0].abs().max() < 1e-9
