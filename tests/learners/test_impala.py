"""The IMPALA objective against a loss written out by hand, the scale of its advantages, and the
clipped objective that its recipe can have instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unirl
from tests.vtrace.reference import slow_vtrace_targets
from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext
from unirl.core.sample import Batch, Slot
from unirl.errors import UniRLError
from unirl.learners.impala import RunningScale
from unirl.transports.local import LocalWeightStore


@pytest.mark.parametrize(
    ("normalize_advantage", "pg_rho_clip"), [(False, None), (True, None), (False, 0.5)]
)
def test_the_loss_is_the_papers(
    make: Callable[..., Any],
    random_slot: Callable[..., Slot],
    normalize_advantage: bool,
    pg_rho_clip: float | None,
) -> None:
    learner, policy, spec = make(
        "impala",
        gamma=0.9,
        entropy_coef=0.03,
        value_coef=0.7,
        normalize_advantage=normalize_advantage,
        pg_rho_clip=pg_rho_clip,
    )
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
        pg_rho_clip=pg_rho_clip,
    )[:2]
    if normalize_advantage:
        advantage = advantage / advantage[mask].square().mean().sqrt()
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


def test_the_running_scale_is_a_mean_at_first_and_follows_the_last_hundreds_later() -> None:
    scale, mask = RunningScale(torch.device("cpu")), torch.tensor([True, True, False])
    squares = []
    for n in range(1, 11):
        x = torch.tensor([float(n), -2.0 * n, 0.0])
        scale.update(x, mask)
        squares.append((n**2 + 4 * n**2) / 2)
        want = (sum(squares) / n) ** 0.5
        torch.testing.assert_close(scale.divide(x), x / want)
    mean = sum(squares) / 10
    for _ in range(2000):
        scale.update(torch.tensor([3.0, 3.0, 0.0]), mask)
    assert scale.divide(torch.tensor(3.0)).item() == pytest.approx(1.0, abs=0.02)
    for n in range(11, 2011):
        mean += max(1 / n, 0.002) * (9 - mean)
    assert float(scale.state_dict()["mean_square"]) == pytest.approx(mean)


def test_a_batch_with_little_to_tell_moves_little(
    make: Callable[..., Any], random_slot: Callable[..., Slot]
) -> None:
    losses = {}
    for loud in (1.0, 1e-3):
        learner, _, spec = make(
            "impala", normalize_advantage=True, gamma=0.0, value_coef=0.0, entropy_coef=0.0
        )
        for parameter in learner.policy.value_head.parameters():
            parameter.data.zero_()  # the advantage is rho times the reward
        learner.step(Batch([random_slot(spec, 1)], 0))
        slot = random_slot(spec, 2)
        slot.data["reward"].mul_(loud)
        losses[loud] = learner.step(Batch([slot], 0)).flush()["losses/policy"]
    assert abs(losses[1e-3]) < 0.01 * abs(losses[1.0])


def test_rows_without_any_advantage_are_scaled_to_zero() -> None:
    scale, mask = RunningScale(torch.device("cpu")), torch.zeros(2, dtype=torch.bool)
    scale.update(torch.zeros(2), mask)
    assert torch.equal(scale.divide(torch.zeros(2)), torch.zeros(2))


def test_a_resume_that_lacks_the_scale_is_refused(make: Callable[..., Any]) -> None:
    saved = make("impala").learner.state_dict()
    with pytest.raises(UniRLError, match=r"learner\.normalize_advantage = False") as error:
        make("impala", normalize_advantage=True).learner.load_state_dict(saved)
    assert len(error.value.parts) == 3


def losses_on_policy(recipe: str, **settings: Any) -> dict[str, float]:
    """What the recipe's learner says of one batch that its own policy has acted."""
    small = {"actor.num_envs": 4, "actor.num_actors": 1, "actor.unroll_length": 8}
    small |= {"queue.batch_size": 1, "policy.hidden": (8,)}
    plan = unirl.make_plan(recipe, **small, **settings)
    learner, weights = plan.learner.make(LearnerContext(plan.learner_seed(0))), LocalWeightStore()
    weights.publish(learner.weights(), 0)
    actor: Any = plan.pools[0].make_actor(ActorContext(0, 7, weights))
    slot = Slot(0, 0, plan.learner.spec.allocate())
    actor.produce(slot)
    actor.close()
    found = learner.step(Batch([slot], 0)).flush()
    return {name: value for name, value in found.items() if name.startswith("losses/")}


@pytest.mark.parametrize("epochs", [1, 4])
def test_with_a_clip_the_recipe_has_ppos_objective_and_its_own_settings(epochs: int) -> None:
    settings: dict[str, Any] = {
        "learner.policy_clip": 0.03,
        "learner.gamma": 0.8,
        "learner.lambda_": 0.7,
        "learner.epochs": epochs,
        "learner.optimizer.lr": 1e-2,
        "learner.optimizer.lr_schedule": "constant",
    }
    impalas = {
        "learner.minibatches": 1,
        "learner.normalize_reward": False,
        "learner.normalize_advantage": False,
    }
    found = losses_on_policy("impala", **settings)
    assert (found["losses/clip_fraction"] > 0) == (epochs > 1)
    want = losses_on_policy("ppo", **settings, **impalas)
    assert found == pytest.approx(want, rel=1e-3, abs=1e-5)
    del settings["learner.policy_clip"]
    assert "losses/clip_fraction" not in losses_on_policy("impala", **settings)
