"""policy.module: a network of the user's own, as torso or whole, with or without memory."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import unirl
from unirl.action_space import ActionMask
from unirl.core.tree import tree_map
from unirl.envs.config import EnvConfig
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig, zero_state
from unirl.policy.own.inputs import example_rows
from unirl.policy.own.network import check_own_networks
from unirl.recipes.probe import fingerprint_of

VECTOR = spaces.Box(-1, 1, (5,), np.float32)
NESTED = spaces.Dict(
    {
        "picture": spaces.Box(0, 255, (3, 16, 16), np.uint8),
        "pose": spaces.Box(-9, 9, (2, 2), np.float64),
        "pair": spaces.Tuple([spaces.Discrete(4, start=2), spaces.MultiBinary(3)]),
    }
)
HYBRID = spaces.Dict(
    {
        "move": spaces.Discrete(3),
        "aim": spaces.Box(-1, 1, (2,), np.float32),
        "keys": spaces.MultiDiscrete([2, 4]),
        "flags": spaces.MultiBinary(2),
    }
)
T, B = 4, 3


def make(
    module: str, observation: Any = VECTOR, action: Any = HYBRID, seed: int = 0, **settings: Any
) -> Policy:
    config = PolicyConfig(module=f"tests.networks:{module}", **settings)
    return Policy(observation, action, config, seed=seed)


def rows(space: gymnasium.Space[Any]) -> Any:
    """[T + 1, B, ...]."""
    flat = example_rows(space, (T + 1) * B)
    return tree_map(lambda leaf: leaf.unflatten(0, (T + 1, B)), flat)


KINDS: dict[str, dict[str, Any]] = {
    "Torso": {},
    "Whole": {},
    "Memory": {"core": "own"},
    "WholeMemory": {"core": "own"},
    "Torso with lstm": {"core": "lstm", "core_size": 8},
    "Torso for each": {"shared_torso": False},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("observation", [VECTOR, NESTED], ids=["box", "nested"])
def test_what_was_acted_is_what_the_learner_unrolls(kind: str, observation: Any) -> None:
    policy = make(kind.split()[0], observation, **KINDS[kind])
    obs, state = rows(observation), policy.initial_state(B)
    first, reset = state, torch.zeros(T + 1, B, dtype=torch.bool)
    reset[2, 1] = True
    generator = torch.Generator().manual_seed(0)
    logps, actions = [], []
    for t in range(T):
        state = zero_state(state, reset[t])
        result = policy.act(tree_map(lambda x, t=t: x[t], obs), state, generator=generator)
        state = result.state
        logps.append(result.logp)
        actions.append(result.action)
    unroll = policy.unroll(obs, first, reset)
    action = {name: torch.stack([one[name] for one in actions]) for name in actions[0]}
    torch.testing.assert_close(unroll.distribution[:-1].log_prob(action), torch.stack(logps))
    assert unroll.value.shape == (T + 1, B) and unroll.value.dtype == torch.float32
    unroll.value.sum().backward()
    unroll.distribution.entropy().sum()


@every_kind
def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone(kind: str) -> None:
    before = torch.get_rng_state()
    a, b, c = (make(kind.split()[0], seed=seed, **KINDS[kind]).weights() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_the_parameters_of_a_whole_network_are_in_the_order_of_the_actions_parts() -> None:
    policy = make("Whole")
    bias = torch.arange(3 + 4 + 6 + 4).float() / 10
    policy.load_weights({**policy.weights(), "torso.module.policy.bias": bias})
    parts: Any = policy.unroll(rows(VECTOR), {}).distribution
    aim, move = parts.parts["aim"], parts.parts["move"]  # Dict sorts its keys
    torch.testing.assert_close(aim.mean[0, 0], bias[:2])
    torch.testing.assert_close(aim.log_std[0, 0], bias[2:4])
    torch.testing.assert_close(move.all_logp[0, 0], bias[-3:].log_softmax(0))


def test_masks_are_applied_to_a_network_that_does_not_see_them() -> None:
    space = spaces.Dict({"obs": VECTOR, "action_mask": ActionMask(4)})
    for module in ("Torso", "Whole"):
        policy = make(module, space, spaces.Discrete(4))
        obs = {"obs": torch.zeros(50, 5), "action_mask": torch.tensor([0, 1, 0, 1]).repeat(50, 1)}
        action = policy.act(obs, {}, generator=torch.Generator().manual_seed(0)).action
        assert isinstance(action, torch.Tensor) and set(action.tolist()) == {1, 3}


def test_observations_are_whitened_where_that_is_set_and_images_never() -> None:
    policy = make("Torso", NESTED, normalize_obs=True)
    obs = rows(NESTED)
    policy.update_normalizer(obs, torch.ones(T, B, dtype=torch.bool))
    seen = policy.inputs(tree_map(lambda leaf: leaf[:T].flatten(0, 1), obs))
    assert seen["picture"].dtype == torch.uint8 and seen["pair"]["0"].dtype == torch.int64
    pose = seen["pose"].flatten(1)
    torch.testing.assert_close(pose.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(pose.std(0, correction=0), torch.ones(4), atol=1e-4, rtol=0)


def test_images_come_as_they_are_with_the_environments_axes() -> None:
    policy = make("Convolutions", spaces.Box(0, 255, (3, 16, 16), np.uint8), spaces.Discrete(4))
    obs = torch.randint(0, 256, (T + 1, B, 3, 16, 16), dtype=torch.uint8)
    assert policy.unroll(obs, {}).value.shape == (T + 1, B)
    action = policy.act(obs[0], {}).action
    assert isinstance(action, torch.Tensor) and action.shape == (B,)


def test_settings_come_as_keywords_and_are_in_the_fingerprint() -> None:
    policy = make("Torso", kwargs={"width": 5})
    assert policy.weights()["torso.module.body.weight"].shape == (5, 5)
    both = VECTOR, HYBRID
    found = fingerprint_of("x", both, policy.config)["policy"]
    assert (found["module"], found["kwargs"]) == ("tests.networks:Torso", {"width": 5})
    assert "module" not in fingerprint_of("x", both, PolicyConfig())["policy"]  # as before


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "Tors": ({}, r'does not exist.*did you mean "Torso"\?'),
    "WrongShape": ({}, r"returned float32 \[\] for 3 observations.*features \[3, F\]"),
    "WrongHeads": ({}, r"returned \(float32 \[3, 16\], float32 \[3\]\).*\(\[3, 17\], \[3\]\)"),
    "Dropout": ({}, r"other numbers when it is called again.*dropout"),
    "BatchNorm": ({}, r"other numbers in eval mode.*batch norm"),
    "MeanOfRows": ({}, r"other numbers when it sees one row alone"),
    "OtherEachTime": ({}, r"another network each time it is made.*torch alone"),
    "Frozen": ({}, r"parameters that do not learn: body\.bias.*register_buffer"),
    "Failing": ({}, r"failed in a forward pass: RuntimeError in .*float32 \[3, 5\]"),
    "NotAModule": ({}, r"is no network.*made a NotAModule"),
    "Torso": ({"core": "own"}, r"no memory that policy\.core own could carry.*no such method"),
    "MemoryOfOnes": ({"core": "own"}, r"dictionary of zeros"),
    "Memory": ({}, r"could not|failed in a forward pass"),
    "Whole": ({"core": "lstm"}, r"has heads of its own, and policy\.core is lstm"),
    "Convolutions": ({"kwargs": {"size": 3}}, r"could not be made: TypeError.*'size': 3"),
}


@pytest.mark.parametrize("module", BAD)
def test_a_network_that_keeps_no_rule_is_refused_in_three_parts(module: str) -> None:
    settings, message = BAD[module]
    with pytest.raises(UniRLError, match=message) as error:
        check_own_networks(make(module, **settings))
    assert len(error.value.parts) == 3


def test_a_value_that_sees_more_needs_features() -> None:
    space = spaces.Dict({"policy": VECTOR, "critic": VECTOR})
    settings = {"critic_group": "critic", "shared_torso": False}
    assert make("Torso", space, **settings).value_torso is not None
    with pytest.raises(UniRLError, match=r"has heads of its own, and the value has observations"):
        make("Whole", space, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"module": "Torso"}, r"policy\.module is 'Torso'.*module:Class"),
        ({"kwargs": {"width": 3}}, r"policy\.kwargs is .* has no effect"),
        ({"core": "own"}, r"policy\.core is own and has no effect"),
        ({"module": "a:B", "compute_dtype": "bfloat16"}, r"gets float32"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UniRLError, match=message):
        PolicyConfig(**settings)


@pytest.mark.parametrize("recipe", ["impala", "ppo", "appo", "ondevice"])
def test_every_recipe_tries_the_network_when_its_plan_is_made(recipe: str) -> None:
    plan = unirl.make_plan(recipe, **{"policy.module": "tests.networks:Torso"})
    assert plan.learner.fingerprint["policy"]["module"] == "tests.networks:Torso"
    with pytest.raises(UniRLError, match=r"other numbers when it is called again"):
        unirl.make_plan(recipe, **{"policy.module": "tests.networks:Dropout"})


def test_defaults_by_kind_leave_an_own_network_alone() -> None:
    settings = {"env.id": "Pendulum-v1", "policy.module": "tests.networks:Whole"}
    config = unirl.make_plan("ppo", by_kind=True, **settings).config
    assert config.policy.shared_torso and config.env == EnvConfig("Pendulum-v1", action_mask="none")
