"""V-trace learns the value of the clipped policy however old the behaviour is (IMPALA, eq. 3).

All trajectories of a few steps are enumerated with their probabilities, so that the expected update
is exact and neither noise nor a step size blurs what is seen.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from unirl.vtrace import vtrace_targets

num_states, num_actions, num_steps = 5, 3, 2
lags = range(17)


class World:
    """A random MDP, some transitions of which end the episode, and a policy changed 16 times."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        shape = (num_states, num_actions, num_states)
        self.transition = (3.0 * uniform(*shape)).softmax(-1)
        self.reward = 2.0 * uniform(*shape) - 1.0
        self.discount = 0.9 * (uniform(*shape) > 0.1).double()
        logits = 2.0 * uniform(len(lags), num_states, num_actions)
        self.policies = logits.cumsum(0).softmax(-1)

    def true_value(self, policy: Tensor) -> Tensor:
        """Solve (I - P_g) V = r for the policy, [S]."""
        reward = torch.einsum("xa,xay,xay->x", policy, self.transition, self.reward)
        onward = torch.einsum("xa,xay,xay->xy", policy, self.transition, self.discount)
        value: Tensor = torch.linalg.solve(torch.eye(num_states).double() - onward, reward)
        return value

    def clipped(self, policy: Tensor, behaviour: Tensor, rho_clip: float) -> Tensor:
        """pi_rho(a|x), proportional to min(rho_clip * mu(a|x), pi(a|x)), [S, A]."""
        weight = torch.minimum(rho_clip * behaviour, policy)
        return weight / weight.sum(-1, keepdim=True)


def converge(
    world: World,
    policy: Tensor,
    behaviour: Tensor,
    *,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    lambda_: float = 1.0,
    corrected: bool = True,
) -> Tensor:
    """Replace V by its expected target over all trajectories of `behaviour`, until it rests."""
    ranges = [range(num_states), *[range(num_actions), range(num_states)] * num_steps]
    path = torch.tensor(list(itertools.product(*ranges))).T
    state, action = path[0::2], path[1::2]  # [T+1, B], [T, B]
    step = state[:-1], action, state[1:]
    probability = (behaviour[state[:-1], action] * world.transition[step]).prod(0)
    log_rho = (policy / behaviour).log()[state[:-1], action]
    if not corrected:
        log_rho = torch.zeros_like(log_rho)
    value = torch.zeros(num_states, dtype=torch.float64)
    for _ in range(2000):
        target = vtrace_targets(
            log_rho,
            world.discount[step],
            world.reward[step],
            value[state],
            rho_clip=rho_clip,
            c_clip=c_clip,
            lambda_=lambda_,
        ).target[0]
        new_value = torch.zeros_like(value).index_add_(0, state[0], probability * target)
        if (new_value - value).abs().max() < 1e-12:
            return new_value
        value = new_value
    raise AssertionError("the expected update did not come to rest in 2000 rounds")


def distance(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


@pytest.mark.parametrize("lag", lags)
def test_vtrace_converges_to_the_value_of_the_clipped_policy_at_any_lag(lag: int) -> None:
    world = World()
    policy, behaviour = world.policies[-1], world.policies[-1 - lag]
    for rho_clip, c_clip, lambda_ in ((1.0, 1.0, 1.0), (1.5, 1.0, 0.9), (1.0, 0.5, 1.0)):
        value = converge(
            world, policy, behaviour, rho_clip=rho_clip, c_clip=c_clip, lambda_=lambda_
        )
        want = world.true_value(world.clipped(policy, behaviour, rho_clip))
        assert distance(value, want) < 1e-9


@pytest.mark.parametrize("lag", lags)
def test_vtrace_without_clip_on_rho_converges_to_the_value_of_the_new_policy(lag: int) -> None:
    world = World()
    policy, behaviour = world.policies[-1], world.policies[-1 - lag]
    value = converge(world, policy, behaviour, rho_clip=math.inf)
    assert distance(value, world.true_value(policy)) < 1e-9


@pytest.mark.parametrize("lag", lags)
def test_without_correction_the_old_policy_is_evaluated_instead(lag: int) -> None:
    world = World()
    policy, behaviour = world.policies[-1], world.policies[-1 - lag]
    value = converge(world, policy, behaviour, corrected=False)
    assert distance(value, world.true_value(behaviour)) < 1e-9
    wrong_by = distance(value, world.true_value(world.clipped(policy, behaviour, 1.0)))
    assert wrong_by < 1e-9 if lag == 0 else wrong_by > 1e-2


def test_clipping_changes_what_is_learned_so_the_fixed_points_differ() -> None:
    world = World()
    policy, behaviour = world.policies[-1], world.policies[0]
    new, clipped = (world.clipped(policy, behaviour, clip) for clip in (math.inf, 1.0))
    assert torch.allclose(new, policy)
    assert distance(world.true_value(new), world.true_value(clipped)) > 1e-2
