"""Actions of several parts, and masks of what is allowed: against the enumeration of all actions,
and the same to actors as to learners.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from unirl.action_space import ActionMask, num_options
from unirl.core.tree import flatten, tree_map
from unirl.policy import Policy, PolicyConfig
from unirl.policy.action_head import linear_layers, make_action_head
from unirl.policy.distributions import Distribution

FINITE = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=-1),
        "tools": spaces.Tuple((spaces.MultiBinary([2, 1]), spaces.MultiDiscrete([2, 3]))),
    }
)
WITH_BOX = spaces.Dict({"aim": spaces.Box(-1, 1, (2,), np.float32), **FINITE.spaces})
OPTIONS = sum(num_options(FINITE))  # 3 + 2 * 2 + 5
OBS = spaces.Dict({"seen": spaces.Box(-1, 1, (4,), np.float32), "legal": ActionMask(OPTIONS)})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_masks(*lead: int, seed: int = 0) -> Tensor:
    """int8 [..., options], at least one of each choice."""
    sizes = num_options(FINITE)
    masks = torch.rand(*lead, OPTIONS, generator=generator(seed)) < 0.6
    for part in masks.split(sizes, -1):
        part[..., 0] |= ~part.any(-1)
    return masks.to(torch.int8)


def every_action() -> dict[str, Any]:
    """All joint actions of FINITE, [72]."""
    rows = list(itertools.product(range(3), range(2), range(2), range(2), range(3)))
    move, bit, other, card, suit = torch.tensor(rows).unbind(1)
    tools = {"0": torch.stack((bit, other), 1)[..., None], "1": torch.stack((card, suit), 1)}
    return {"move": move, "tools": tools}


def is_allowed(mask: Tensor) -> Tensor:
    """Which of them a mask [options] allows: one option after the other, by hand."""
    found = []
    for move, bit, other, card, suit in itertools.product(
        range(3), range(2), range(2), range(2), range(3)
    ):
        columns = (move, 3 + bit, 5 + other, 7 + card, 9 + suit)
        found.append(all(bool(mask[column]) for column in columns))
    return torch.tensor(found)


def head(space: Any = FINITE) -> torch.nn.Module:
    module = make_action_head(space, linear_layers(4, generator()), 0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator(1)))
    return module


def exact(distribution: Distribution) -> Tensor:
    """Probability of every joint action, float64 [72]."""
    actions = every_action()
    row = distribution[0]
    logp = [row.log_prob(tree_map(lambda leaf, i=i: leaf[i], actions)) for i in range(72)]
    return torch.stack(logp).double().exp()


@pytest.mark.parametrize("seed", range(4))
def test_log_probability_entropy_and_kl_are_those_of_all_joint_actions(seed: int) -> None:
    mask = random_masks(1, seed=seed)
    features = torch.randn(2, 1, 4, generator=generator(seed))
    module = head()
    free, ours, other = (
        module(features[0], None),
        module(features[0], mask),
        module(features[1], mask),
    )
    allowed = is_allowed(mask[0])
    p, q = exact(ours), exact(other)
    assert p.sum().item() == pytest.approx(1, abs=1e-6) and (p[~allowed] == 0).all()
    # Masked probabilities are the free ones of what is allowed, scaled to sum to one.
    want = torch.where(allowed, exact(free), 0.0)
    torch.testing.assert_close(p, want / want.sum(), rtol=1e-4, atol=1e-7)
    some = p > 0
    assert ours.entropy().item() == pytest.approx(-(p[some] * p[some].log()).sum().item(), abs=1e-4)
    kl = (p[some] * (p[some] / q[some]).log()).sum().item()
    assert ours.kl(other).item() == pytest.approx(kl, abs=1e-4)
    best = flatten(ours.mode())
    likeliest = flatten(tree_map(lambda leaf: leaf[p.argmax()], every_action()))
    assert all(torch.equal(best[name][0], likeliest[name]) for name in likeliest)


def test_samples_come_with_their_probabilities_and_never_from_outside_the_mask() -> None:
    mask = random_masks(1, seed=1)
    distribution = head()(torch.randn(1, 4, generator=generator()).expand(20_000, 4), mask)
    drawn = distribution.sample(generator())
    assert drawn["tools"]["0"].shape == (20_000, 2, 1)
    counted = drawn["move"] * 24 + drawn["tools"]["0"][:, 0, 0] * 12
    counted += drawn["tools"]["0"][:, 1, 0] * 6
    counted += drawn["tools"]["1"][:, 0] * 3 + drawn["tools"]["1"][:, 1]
    share = counted.bincount(minlength=72) / 20_000
    p = exact(distribution)
    assert (share[p == 0] == 0).all()
    assert (share - p).abs().max() < 4 * math.sqrt(0.25 / 20_000)


def test_a_box_part_adds_its_density_and_its_gradient() -> None:
    module, features = head(WITH_BOX), torch.randn(5, 4, generator=generator())
    mask = random_masks(5)
    ours = module(features, mask)
    action = ours.sample(generator())
    aim, rest = ours.parts["aim"], [p for name, p in ours.parts.items() if name != "aim"]
    parts = [action[name] for name in ours.parts if name != "aim"]
    logp = aim.log_prob(action["aim"]) + sum(map(lambda d, a: d.log_prob(a), rest, parts))
    torch.testing.assert_close(ours.log_prob(action), logp)
    torch.testing.assert_close(ours.entropy(), aim.entropy() + sum(d.entropy() for d in rest))
    (
        ours.log_prob(action).sum() + ours.entropy().sum() + ours.kl(module(-features, mask)).sum()
    ).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("space", [FINITE, WITH_BOX], ids=["finite", "with a box"])
def test_actor_and_learner_agree_on_masked_actions(space: Any, core: Any) -> None:
    policy = Policy(OBS, space, PolicyConfig(hidden=(8,), core=core, core_size=4), seed=0)
    masks = random_masks(6, 3)
    obs = {"seen": torch.randn(6, 3, 4, generator=generator()), "legal": masks}
    state, actions, logps, draws = policy.initial_state(3), [], [], generator()
    for t in range(6):
        action, logp, state = policy.act(
            tree_map(lambda leaf, t=t: leaf[t], obs), state, generator=draws
        )
        actions.append(action)
        logps.append(logp)
    stacked = tree_map(lambda *rows: torch.stack(rows), *actions)
    unroll = policy.unroll(obs, policy.initial_state(3), None)
    torch.testing.assert_close(unroll.distribution.log_prob(stacked), torch.stack(logps))
    # What stands for filler rows, and what a mask forbids, makes no NaN in a gradient.
    forbidden = tree_map(torch.zeros_like, stacked)
    (unroll.distribution.log_prob(forbidden).clamp(min=-50).mean() + unroll.value.mean()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())


def test_networks_do_not_read_the_mask() -> None:
    policy = Policy(OBS, FINITE, PolicyConfig(hidden=(8,)), seed=0)
    without = spaces.Dict({"seen": OBS["seen"]})
    plain = Policy(without, FINITE, PolicyConfig(hidden=(8,)), seed=0)
    seen = torch.randn(2, 3, 4, generator=generator())
    value = policy.unroll({"seen": seen, "legal": random_masks(2, 3)}, {}).value
    assert torch.equal(value, plain.unroll({"seen": seen}, {}).value)
