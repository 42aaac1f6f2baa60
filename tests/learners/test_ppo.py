"""The PPO objective against GAE and a clipped loss written out by hand, on- and off-policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.vtrace.reference import slow_gae, slow_vtrace_gae
from unirl.core.sample import Batch, Slot
from unirl.errors import UniRLError
from unirl.learners.ppo import PpoLearnerConfig
from unirl.metrics.metrics import Metrics
from unirl.policy import Policy

PLAIN = {"epochs": 1, "minibatches": 1, "normalize_reward": False}


def act_on_policy(policy: Policy, slot: Slot) -> None:
    """Give the slot's actions the probabilities that the policy itself has for them."""
    data = slot.data
    reset = torch.cat((torch.zeros_like(data["mask"][:1]), ~data["mask"]))
    with torch.no_grad():
        unroll = policy.unroll(data["obs"], data.get("state", {}), reset)
        data["logp"].copy_(unroll.distribution[:-1].log_prob(data["action"]))


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("normalize_advantage", [False, True])
def test_on_policy_a_single_step_has_the_gradient_of_the_policy_gradient_with_gae(
    make: Callable[..., Any], random_slot: Callable[..., Slot], normalize_advantage: bool
) -> None:
    settings = {"gamma": 0.9, "lambda_": 0.8, "entropy_coef": 0.03, "value_coef": 0.7}
    learner, policy, spec = make(
        "ppo", **PLAIN, **settings, normalize_advantage=normalize_advantage
    )
    slot = random_slot(spec, 1)
    act_on_policy(policy, slot)
    data, mask = slot.data, slot.data["mask"]
    unroll = policy.unroll(data["obs"], {}, None)
    target, advantage = slow_gae(
        0.9 * (~data["terminated"]).double(),
        data["reward"].double(),
        unroll.value.detach().double(),
        mask=mask,
        lambda_=0.8,
    )
    if normalize_advantage:
        kept = advantage[mask]
        advantage = (advantage - kept.mean()) / kept.std(unbiased=False)
    new_logp = unroll.distribution[:-1].log_prob(data["action"])
    loss = (
        -(new_logp * advantage)[mask].mean()
        + 0.7 * 0.5 * (unroll.value[:-1] - target)[mask].square().mean()
        - 0.03 * unroll.distribution[:-1].entropy()[mask].mean()
    )
    want = flat(torch.autograd.grad(loss, list(policy.parameters())))
    metrics = learner.step(Batch([slot], 0)).flush()
    assert metrics["losses/grad_norm"] == pytest.approx(want.norm().item(), rel=1e-4)
    assert metrics["losses/approx_kl"] == metrics["losses/clip_fraction"] == 0.0
    assert metrics["losses/behaviour_kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_lagging_batch_is_ppo_around_the_policy_of_the_moment_with_vtrace_advantages(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    settings = {"gamma": 0.9, "lambda_": 0.8, "policy_clip": 0.1, "value_clip": 0.05}
    settings["pg_rho_clip"] = 0.7
    learner, policy, spec = make("ppo", **PLAIN, **settings, normalize_advantage=False)
    slot = random_slot(spec, 1)
    data, mask = slot.data, slot.data["mask"]
    rows = learner.objective.prepare(learner.rows(data), Metrics())
    unroll = policy.unroll(data["obs"], {}, None)
    prox_logp = unroll.distribution[:-1].log_prob(data["action"]).detach()
    prox_value = unroll.value.detach()
    want = slow_vtrace_gae(
        (prox_logp - data["logp"]).double(),
        0.9 * (~data["terminated"]).double(),
        data["reward"].double(),
        prox_value.double(),
        mask=mask,
        pg_rho_clip=0.7,
        lambda_=0.8,
    )
    # Without memory all steps are side by side.
    torch.testing.assert_close(rows["target"][0], want.target.float().flatten())
    torch.testing.assert_close(rows["advantage"][0], want.advantage.float().flatten())
    with torch.no_grad():  # the policy moves on, as after some steps on the batch
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    metrics = Metrics()
    losses = learner.objective.losses(rows, metrics)
    unroll = policy.unroll(data["obs"], {}, None)
    ratio = (unroll.distribution[:-1].log_prob(data["action"]) - prox_logp).exp()[mask]
    gain = want.advantage[mask]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.9, 1.1) * gain)
    near = prox_value + (unroll.value - prox_value).clamp(-0.05, 0.05)
    errors = [((value[:-1] - want.target)[mask]).square() for value in (unroll.value, near)]
    outside = (ratio - 1).abs() > 0.1
    assert 0 < outside.sum() < len(outside)
    assert losses.policy.mean().item() == pytest.approx(-surrogate.mean().item(), rel=1e-4)
    assert losses.value.mean().item() == pytest.approx(
        0.5 * torch.maximum(*errors).mean().item(), rel=1e-4
    )
    assert metrics.flush()["losses/clip_fraction"] == pytest.approx(outside.float().mean().item())


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_the_proximal_policy_in_minibatches_is_that_of_the_whole_batch(
    make: Callable[..., Any], random_slot: Callable[..., Slot], core: str
) -> None:
    found = []
    for minibatches in (1, 4):
        learner, policy, spec = make("ppo", core=core, epochs=2, minibatches=minibatches)
        slot = random_slot(spec, 1)
        act_on_policy(policy, slot)
        metrics = Metrics()
        found.append(learner.objective.prepare(learner.rows(slot.data), metrics))
        # States and resets are the actor's own, so it is on-policy to rounding.
        assert metrics.flush()["losses/behaviour_kl"] == pytest.approx(0.0, abs=1e-9)
    for name in ("prox_logp", "prox_value", "target", "advantage"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)


def test_a_pass_that_has_not_moved_the_policy_does_not_raise_the_step_size(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    optimizer = {"lr": 1e-3, "lr_schedule": "adaptive", "target_kl": 1e12}
    learner, _, spec = make("ppo", **{**PLAIN, "epochs": 2}, optimizer=optimizer)
    metrics = learner.step(Batch([random_slot(spec, 1)], 0)).flush()
    # The first of two passes begins where the policy stands: only the second tells something.
    assert metrics["losses/learning_rate"] == pytest.approx(1.5e-3)


def test_clipped_passes_stay_near_the_policy_they_began_with(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    divergence = {}
    for clip in (0.05, 100.0):
        learner, policy, spec = make(
            "ppo",
            epochs=30,
            minibatches=1,
            policy_clip=clip,
            entropy_coef=0.0,
            value_coef=0.0,
            optimizer={"lr": 1e-2},
        )
        slot = random_slot(spec, 1)
        act_on_policy(policy, slot)
        learner.step(Batch([slot], 0))
        before = slot.data["logp"].clone()
        act_on_policy(policy, slot)
        divergence[clip] = (slot.data["logp"] - before)[slot.data["mask"]].abs().mean().item()
    assert divergence[0.05] < 0.5 * divergence[100.0]


def test_explained_variance_is_one_for_a_perfect_value_and_zero_for_a_constant_one(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    learner, policy, spec = make("ppo", **PLAIN, gamma=0.0)
    slot = random_slot(spec, 1)
    act_on_policy(policy, slot)
    for parameter in policy.value_head.parameters():
        parameter.data.zero_()
    assert learner.step(Batch([slot], 0)).flush()["losses/explained_variance"] == 0.0
    with torch.no_grad():
        value = policy.unroll(slot.data["obs"], {}, None).value
    slot.data["reward"].copy_(value[:-1])
    metrics = Metrics()
    learner.objective.prepare(learner.rows(slot.data), metrics)
    assert metrics.flush()["losses/explained_variance"] == pytest.approx(1.0)


def test_values_that_the_acting_policy_left_are_not_computed_again(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    learner, policy, spec = make("ppo", **PLAIN)
    slot = random_slot(spec, 1)
    act_on_policy(policy, slot)
    data = slot.data
    with torch.no_grad():
        value = policy.value(data["obs"])
    found, again, other = (
        learner.objective.prepare(learner.rows(rows), Metrics())
        for rows in ({**data, "value": value}, data, {**data, "value": value + 1.0})
    )
    for name in ("target", "advantage", "prox_logp", "prox_value"):
        torch.testing.assert_close(found[name], again[name], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found["target"], other["target"])


@pytest.mark.parametrize("name", ["policy_clip", "value_clip"])
def test_a_clip_that_leaves_no_room_is_refused_in_three_parts(name: str) -> None:
    with pytest.raises(UniRLError, match=f"learner.{name} is -0.1") as error:
        PpoLearnerConfig(**{name: -0.1})  # type: ignore[arg-type]
    assert len(error.value.parts) == 3


def test_without_memory_minibatches_mix_steps_and_add_up_to_the_batch(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    learner, _, spec = make("ppo", **{**PLAIN, "minibatches": 2}, value_clip=0.1)
    slot = random_slot(spec, 1)
    rows = learner.objective.prepare(learner.rows(slot.data), Metrics())
    whole = learner.objective.losses(rows, Metrics())
    parts = [share() for (share,) in learner.minibatches(rows)]
    found = [learner.objective.losses(part, Metrics()) for part in parts]
    for name in ("policy", "value", "entropy", "divergence"):
        want = getattr(whole, name)
        numerator = sum(getattr(one, name).numerator for one in found)
        assert float(sum(getattr(one, name).denominator for one in found)) == want.denominator
        torch.testing.assert_close(numerator, want.numerator, rtol=1e-4, atol=1e-5)
    # Drawn from everywhere: in each half some step's successor is missing.
    num_steps = slot.data["mask"].numel()
    assert [part["mask"].numel() for part in parts] == [num_steps // 2] * 2
    first = {tuple(row.tolist()) for row in parts[0]["obs"][0].flatten(1)}
    unrolls = slot.data["obs"][:-1].transpose(0, 1).flatten(2)
    assert all(
        0 < sum(tuple(row.tolist()) in first for row in unroll) < len(unroll) for unroll in unrolls
    )


def test_a_scaled_reward_is_normalised_like_the_plain_one(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    found = []
    for scale in (1.0, 0.01):
        learner, _, spec = make("ppo", normalize_reward=True, reward_scale=scale)
        slot = random_slot(spec, 2)
        slot.data["carry"].copy_(torch.tensor([3.0, -2.0, 5.0, 0.5]))  # unscaled, as actors tell it
        for _ in range(20):
            reward = learner.rows(slot.data)["reward"]
        found.append(reward)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_a_clipped_value_is_held_near_what_the_network_said(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    learner, policy, spec = make("ppo", **PLAIN, normalize_value=True, value_clip=0.2)
    slot = random_slot(spec, 3)
    slot.data["reward"].sub_(50.0)  # far from what the statistics begin with
    act_on_policy(policy, slot)
    rows = learner.objective.prepare(learner.rows(slot.data), Metrics())
    with torch.no_grad():
        said = policy.unroll(slot.data["obs"], {}, None).value[:-1]
    torch.testing.assert_close(rows["prox_value"].flatten(), said.flatten())
    assert abs(float(rows["target"][rows["mask"]].mean())) < 0.1  # in units of the targets
