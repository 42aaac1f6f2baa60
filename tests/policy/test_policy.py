"""The policy as actors and learners use it: every space, equal results acting and unrolled,
weights.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from unirl.core.tree import tree_map
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig
from unirl.policy.config import ComputeDtypeName, CoreName

VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
PONG = spaces.Box(0, 255, (4, 84, 84), np.uint8)
SMALL = spaces.Box(0, 255, (3, 20, 20), np.uint8)
LARGE = spaces.Box(0, 255, (3, 40, 40), np.uint8)
BUTTONS = spaces.Discrete(3)

OBSERVATIONS: dict[str, gymnasium.Space[Any]] = {
    "vector": VECTOR,
    "matrix": spaces.Box(-1, 1, (2, 3), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (4, 40, 36), np.uint8),
    "image_hwc": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "image_gray": spaces.Box(0, 255, (36, 40), np.uint8),
    "stack_hwc": spaces.Box(0, 255, (2, 36, 40, 3), np.uint8),
    "stack_chw": spaces.Box(0, 255, (2, 3, 36, 40), np.uint8),
    "small_image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "ram": spaces.Box(0, 255, (16,), np.uint8),
    "discrete": spaces.Discrete(7),
    "many_discrete": spaces.Discrete(5000),
    "multi_discrete": spaces.MultiDiscrete([2, 5, 3]),
    "multi_binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (3, 36, 36), np.uint8),
            "joints": VECTOR,
            "mode": spaces.Discrete(3),
            "nested": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2))),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(4), VECTOR)),
}

ACTIONS: dict[str, gymnasium.Space[Any]] = {
    "discrete": BUTTONS,
    "multi_equal": spaces.MultiDiscrete([3, 3]),
    "multi_unequal": spaces.MultiDiscrete([2, 5, 3]),
    "multi_binary": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-1, 1, (4,), np.float32),
    "box_2d": spaces.Box(-1, 1, (2, 3), np.float32),
    "box_0d": spaces.Box(-1, 1, (), np.float32),
}


def observations(space: gymnasium.Space[Any], lead: tuple[int, ...], seed: int = 0) -> Any:
    """Random observations as a tree with the leading axes, as an environment adapter makes them."""
    rng = np.random.default_rng(seed)
    if isinstance(space, spaces.Dict):
        return {key: observations(child, lead, seed) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): observations(child, lead, seed) for i, child in enumerate(space.spaces)}
    if isinstance(space, spaces.Discrete):
        return torch.from_numpy(rng.integers(0, space.n, lead))
    if isinstance(space, spaces.MultiDiscrete):
        return torch.from_numpy(rng.integers(0, space.nvec, lead + space.shape))
    if isinstance(space, spaces.MultiBinary):
        return torch.from_numpy(rng.integers(0, 2, lead + space.shape))
    assert isinstance(space, spaces.Box)
    if space.dtype == np.uint8:
        return torch.from_numpy(rng.integers(0, 256, lead + space.shape, np.uint8))
    return torch.from_numpy(rng.normal(size=lead + space.shape).astype(np.float32))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(
    obs: gymnasium.Space[Any] = VECTOR, action: gymnasium.Space[Any] = BUTTONS, **config: Any
) -> Policy:
    return Policy(obs, action, PolicyConfig(**{"feature_size": 32, **config}), seed=0)


def loss_of(policy: Policy, obs: Any, action: Tensor) -> Tensor:
    distribution, value = policy.unroll(obs, policy.initial_state(action.shape[1]), None)
    logp, entropy = distribution.log_prob(action), distribution.entropy()
    return logp.mean() + entropy.mean() + value.square().mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_space_acts_and_learns(name: str, dtype: ComputeDtypeName) -> None:
    space = OBSERVATIONS[name]
    policy = make(space, compute_dtype=dtype)
    obs = observations(space, (3, 2))
    result = policy.act(tree_map(lambda leaf: leaf[0], obs), {}, generator=generator())
    assert result.action.shape == result.logp.shape == (2,)
    assert result.logp.dtype == torch.float32
    loss_of(policy, obs, torch.zeros(3, 2, dtype=torch.int64)).backward()
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_part_of_an_observation_is_read(name: str) -> None:
    space = OBSERVATIONS[name]
    policy = make(space)
    first, second = observations(space, (1, 8), seed=0), observations(space, (1, 8), seed=1)
    for path in _paths(first):
        mixed = _replace(first, second, path)
        change = policy.unroll(mixed, {}).value - policy.unroll(first, {}).value
        assert change.abs().max() > 1e-6, path


def _paths(tree: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(tree, Tensor):
        return [prefix]
    return [path for key, child in tree.items() for path in _paths(child, (*prefix, key))]


def _replace(tree: Any, other: Any, path: tuple[str, ...]) -> Any:
    if not path:
        return other
    return {**tree, path[0]: _replace(tree[path[0]], other[path[0]], path[1:])}


def test_the_same_picture_in_another_layout_is_the_same_picture() -> None:
    frames = observations(spaces.Box(0, 255, (2, 3, 36, 40), np.uint8), (1, 4))
    layouts = {
        (6, 36, 40): frames.flatten(2, 3),
        (36, 40, 6): frames.flatten(2, 3).movedim(2, -1),
        (2, 3, 36, 40): frames,
        (2, 36, 40, 3): frames.movedim(3, -1),
    }
    values = []
    for shape, obs in layouts.items():
        policy = make(spaces.Box(0, 255, shape, np.uint8))
        values.append(policy.unroll(obs.contiguous(), {}).value)
    for value in values[1:]:
        torch.testing.assert_close(value, values[0])


def test_a_smaller_stride_reads_smaller_images_whitened_or_not() -> None:
    obs = observations(SMALL, (1, 4))
    assert make(SMALL).inputs(obs[0]).images == [], "auto: too small for the usual stride"
    for config in ({}, {"normalize_images": True}):
        policy = make(SMALL, image_stride=2, **config)
        assert policy.inputs(obs[0]).images[0].shape == (4, 3, 20, 20)
        assert policy.unroll(obs, {}).value.unique().numel() == 4
    large = observations(LARGE, (1, 4))
    assert make(LARGE, image_stride=2).inputs(large[0]).images[0].shape == (4, 3, 40, 40), (
        "blocks of 4 x 4 pixels serve a stride of 4 alone"
    )


def test_bytes_that_are_no_image_are_scaled() -> None:
    x = torch.tensor([[0, 51, 102, 153, 204, 255]], dtype=torch.uint8)
    policy = make(spaces.Box(0, 255, (6,), np.uint8))
    torch.testing.assert_close(policy.inputs(x).vector, x / 255)


def test_discrete_observations_are_distinguished() -> None:
    for space in (spaces.Discrete(7), spaces.Discrete(600)):
        value = make(space).unroll(torch.arange(7).view(1, 7), {}).value
        assert len(value.unique()) == 7


@pytest.mark.parametrize("sizes", [(2, 5, 3), (2, 5, 600)])
def test_multi_discrete_observations_are_distinguished(sizes: tuple[int, ...]) -> None:
    grid = torch.cartesian_prod(*(torch.arange(min(size, 5)) for size in sizes))
    value = make(spaces.MultiDiscrete(list(sizes))).unroll(grid[None], {}).value
    assert len(value.unique()) == len(grid)


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_space_has_its_shape_and_logp(name: str, core: CoreName) -> None:
    space = ACTIONS[name]
    policy = make(action=space, core=core)
    obs = observations(VECTOR, (6,))
    for deterministic in (False, True):
        action, logp, _ = policy.act(
            obs, policy.initial_state(6), generator=generator(), deterministic=deterministic
        )
        assert action.shape == (6, *space.shape)
        assert action.dtype == (torch.float32 if isinstance(space, spaces.Box) else torch.int64)
        assert logp.shape == (6,)
        unroll = policy.unroll(obs[None], policy.initial_state(6), None)
        torch.testing.assert_close(unroll.distribution.log_prob(action[None])[0], logp)
        if isinstance(space, spaces.MultiDiscrete):
            assert all(space.contains(row) for row in action.numpy())


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("name", ["vector", "dict", "image"])
def test_acting_step_by_step_is_unrolling(name: str, core: CoreName) -> None:
    num_rows, num_envs = 9, 3
    space = OBSERVATIONS[name]
    policy = make(space, core=core, core_size=16)
    # Far from the nearly uniform first policy, so that a wrong state would show.
    with torch.no_grad():
        for parameter in policy.action_head.parameters():
            parameter.mul_(100)
    obs = observations(space, (num_rows, num_envs))
    reset = torch.rand(num_rows, num_envs, generator=generator()) < 0.3
    start = policy.initial_state(num_envs)
    start = {key: torch.randn(value.shape, generator=generator()) for key, value in start.items()}
    state, actions, logps = start, [], []
    for t in range(num_rows):
        state = {key: value * ~reset[t, :, None] for key, value in state.items()}
        row = tree_map(lambda leaf, t=t: leaf[t], obs)
        action, logp, state = policy.act(row, state, generator=generator(t))
        actions.append(action)
        logps.append(logp)
    new_logp = policy.unroll(obs, start, reset).distribution.log_prob(torch.stack(actions))
    torch.testing.assert_close(new_logp, torch.stack(logps), atol=1e-5, rtol=1e-5)


def test_a_state_passed_in_is_not_changed() -> None:
    policy = make(core="lstm")
    state = policy.initial_state(2)
    after = policy.act(observations(VECTOR, (2,)), state, generator=generator()).state
    assert all((value == 0).all() for value in state.values())
    assert all((value != 0).any() for value in after.values())


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    space, config = OBSERVATIONS["dict"], PolicyConfig(feature_size=16, core="gru")
    first, same, other = (Policy(space, BUTTONS, config, seed=s).weights() for s in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["torso.mlp.layers.0.weight"], other["torso.mlp.layers.0.weight"])


def test_the_global_random_state_is_neither_read_nor_changed() -> None:
    before = torch.get_rng_state()
    policy = make(OBSERVATIONS["dict"], core="lstm")
    obs = observations(OBSERVATIONS["dict"], (2,))
    policy.act(obs, policy.initial_state(2), generator=generator())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12345)
    again = make(OBSERVATIONS["dict"], core="lstm").weights()
    torch.set_rng_state(before)
    assert all(torch.equal(again[name], value) for name, value in policy.weights().items())


def test_the_first_policy_is_nearly_uniform() -> None:
    entropy = make(PONG).unroll(observations(PONG, (1, 8)), {}).distribution.entropy()
    torch.testing.assert_close(entropy, torch.full((1, 8), np.log(3)).float(), atol=1e-3, rtol=0)


def test_gaussian_std_is_the_same_in_every_state_and_learned() -> None:
    policy = make(action=ACTIONS["box"], initial_std=0.5)
    entropy = policy.unroll(observations(VECTOR, (2, 3)), {}).distribution.entropy()
    expected = 4 * (0.5 * np.log(2 * np.pi * np.e) + np.log(0.5))
    torch.testing.assert_close(entropy, torch.full((2, 3), expected).float())
    entropy.sum().backward()
    log_std = dict(policy.named_parameters())["action_head.log_std"]
    assert log_std.grad is not None and (log_std.grad == 6).all()


def test_a_separate_value_torso_shares_nothing_with_the_policy() -> None:
    policy = make(shared_torso=False)
    policy.unroll(observations(VECTOR, (2, 3)), {}).value.sum().backward()
    reached = {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == {"value_torso", "value_head"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_loaded_while_acting_can_still_be_learned(dtype: ComputeDtypeName) -> None:
    policy, obs = make(core="lstm", compute_dtype=dtype), observations(VECTOR, (3, 2))
    newer = Policy(VECTOR, BUTTONS, policy.config, seed=9)
    state = policy.act(obs[0], policy.initial_state(2), generator=generator()).state
    with torch.inference_mode():
        policy.load_weights(newer.weights())
    policy.act(obs[0], policy.initial_state(2), generator=generator())
    unroll = policy.unroll(obs, state, None)
    (unroll.value.sum() + unroll.distribution.entropy().sum()).backward()
    assert all(p.grad is not None for p in policy.parameters())
    state["h"].zero_()


def test_weights_round_trip_bit_for_bit_through_pickle_into_another_policy() -> None:
    config = PolicyConfig(normalize_obs=True, core="gru", feature_size=16)
    source = Policy(OBSERVATIONS["dict"], BUTTONS, config, seed=1)
    obs = observations(OBSERVATIONS["dict"], (4, 3))
    source.update_normalizer(obs, torch.ones(3, 3, dtype=torch.bool))
    target = Policy(OBSERVATIONS["dict"], BUTTONS, config, seed=2)
    target.load_weights(pickle.loads(pickle.dumps(source.weights())))
    assert all(
        torch.equal(target.weights()[name], value) for name, value in source.weights().items()
    )
    state = source.initial_state(3)
    assert torch.equal(target.unroll(obs, state).value, source.unroll(obs, state).value)


def test_a_policy_can_be_pickled_and_copied() -> None:
    policy, obs = (
        make(OBSERVATIONS["dict"], core="lstm"),
        observations(OBSERVATIONS["dict"], (2, 2)),
    )
    expected = policy.unroll(obs, policy.initial_state(2)).value
    for twin in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert torch.equal(twin.unroll(obs, policy.initial_state(2)).value, expected)


def test_full_precision_weights_load_into_a_bfloat16_policy_in_place() -> None:
    master = Policy(PONG, BUTTONS, PolicyConfig(), seed=1)
    policy = Policy(PONG, BUTTONS, PolicyConfig(compute_dtype="bfloat16"), seed=2)
    views, contiguous = policy.weights(), {k: v.contiguous() for k, v in master.weights().items()}
    policy.load_weights(contiguous)
    kernel = "torso.images.0.conv2.weight"
    assert torch.equal(views[kernel], master.weights()[kernel].bfloat16())
    assert views[kernel].is_contiguous(memory_format=torch.channels_last)


def test_what_is_fragile_stays_float32_under_bfloat16() -> None:
    config = PolicyConfig(compute_dtype="bfloat16", normalize_obs=True, core="lstm")
    weights = Policy(VECTOR, ACTIONS["box"], config, seed=0).weights()
    low = {name.split(".")[0] for name, value in weights.items() if value.dtype == torch.bfloat16}
    assert low == {"torso", "core"}
    assert weights["inputs.norm.mean"].dtype == torch.float64


def test_bfloat16_agrees_with_float32_to_its_precision() -> None:
    obs = observations(PONG, (2, 4))
    full = Policy(PONG, BUTTONS, PolicyConfig(), seed=0)
    low = Policy(PONG, BUTTONS, PolicyConfig(compute_dtype="bfloat16"), seed=0)
    expected = full.unroll(obs, {}).value
    error = low.unroll(obs, {}).value - expected
    assert error.abs().max() < 0.03 * expected.abs().max()


def test_weights_of_another_policy_are_refused_by_name() -> None:
    with pytest.raises(UniRLError, match=r"torso\.mlp\.layers\.0\.weight"):
        make().load_weights(make(spaces.Box(-1, 1, (6,), np.float32)).weights())
    with pytest.raises(UniRLError, match=r"core\.input_bias"):
        make().load_weights(make(core="gru").weights())


def test_statistics_count_the_masked_rows_of_an_unroll_and_travel_as_weights() -> None:
    space = OBSERVATIONS["dict"]
    learner, actor = make(space, normalize_obs=True), make(space, normalize_obs=True)
    obs = observations(space, (5, 3))
    mask = torch.rand(4, 3, generator=generator()) < 0.7
    learner.update_normalizer(obs, mask)
    rows = torch.cat((obs["joints"][:4][mask], obs["nested"]["0"][:4][mask]), 1).double()
    torch.testing.assert_close(learner.weights()["inputs.norm.mean"], rows.mean(0))
    assert learner.weights()["inputs.norm.count"] == mask.sum()
    actor.load_weights(learner.weights())
    assert torch.equal(actor.unroll(obs, {}).value, learner.unroll(obs, {}).value)


CRITIC_SPACE = spaces.Dict({"policy": VECTOR, "critic": VECTOR})


def test_a_critics_own_observations_are_normalised_too() -> None:
    policy = make(CRITIC_SPACE, shared_torso=False, critic_group="critic", normalize_obs=True)
    obs = observations(CRITIC_SPACE, (5, 3))
    obs["critic"] = obs["policy"] * 2 + 1
    policy.update_normalizer(obs, torch.ones(4, 3, dtype=torch.bool))
    for reader, group in (("inputs", "policy"), ("value_inputs", "critic")):
        mean = obs[group][:4].double().mean((0, 1))
        torch.testing.assert_close(policy.weights()[f"{reader}.norm.mean"], mean)


@pytest.mark.parametrize(
    "config", [{}, {"shared_torso": False}, {"shared_torso": False, "critic_group": "critic"}]
)
def test_the_value_of_lone_observations_is_that_of_an_unroll(config: dict[str, Any]) -> None:
    policy = make(CRITIC_SPACE, **config)
    obs = observations(CRITIC_SPACE, (4, 2))
    obs["critic"] = obs["policy"] * 2 + 1
    torch.testing.assert_close(policy.value(obs), policy.unroll(obs, {}).value)


def test_normalised_observations_do_not_depend_on_units() -> None:
    values = []
    for scale in (1.0, 1000.0):
        policy = make(normalize_obs=True)
        obs = observations(VECTOR, (50, 4)) * scale + scale
        policy.update_normalizer(obs, torch.ones(50, 4, dtype=torch.bool))
        values.append(policy.unroll(obs, {}).value)
    torch.testing.assert_close(values[0], values[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("obs", "action", "config", "message"),
    [
        (spaces.Text(5), BUTTONS, {}, "observation space"),
        (spaces.Dict({"a": spaces.Text(5)}), BUTTONS, {}, "'a'"),
        (VECTOR, spaces.Text(3), {}, "action space"),
        (VECTOR, spaces.Dict({"a": BUTTONS, "b": spaces.Text(3)}), {}, "action space"),
        (VECTOR, spaces.Box(0, 5, (2,), np.int64), {}, "action space"),
        (VECTOR, BUTTONS, {"torso": "nature"}, "no image"),
        (SMALL, BUTTONS, {"torso": "nature"}, "too small"),
        (SMALL, BUTTONS, {"torso": "shallow", "image_stride": 5}, ">= 25"),
        (SMALL, BUTTONS, {"torso": "shallow", "image_stride": 0}, "image_stride"),
        (PONG, BUTTONS, {"normalize_obs": True}, "nothing to normalise"),
        (VECTOR, BUTTONS, {"core": "lstm", "shared_torso": False}, "shared_torso"),
        (VECTOR, BUTTONS, {"hidden": (64, 0)}, "hidden"),
        (VECTOR, BUTTONS, {"core": "transformer"}, "none, lstm, gru"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(
    obs: gymnasium.Space[Any], action: gymnasium.Space[Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UniRLError, match=message) as caught:
        make(obs, action, **config)
    assert caught.value.remedy


def test_a_memory_of_the_first_observation_can_be_learned() -> None:
    """The cue is visible in row 0 only; the core must carry it over five rows and one reset."""
    policy = make(
        spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2), core="lstm", core_size=16
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    reset = torch.zeros(12, 64, dtype=torch.bool)
    reset[6] = True
    loss = torch.tensor(1.0)
    for step in range(60):
        cue = torch.randint(0, 2, (2, 64), generator=generator(step))
        obs = torch.zeros(12, 64, 1)
        obs[0, :, 0], obs[6, :, 0] = cue[0] * 2.0 - 1, cue[1] * 2.0 - 1
        logp = policy.unroll(obs, policy.initial_state(64), reset).distribution.log_prob(
            cue.repeat_interleave(6, 0)
        )
        loss = -logp[[5, 11]].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vector", "image", "dict"])
@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_a_gpu_agrees_with_the_cpu(name: str, core: CoreName) -> None:
    space = OBSERVATIONS[name]
    policy = make(space, core=core, normalize_obs=name != "image")
    obs = observations(space, (4, 3))
    reset = torch.rand(4, 3, generator=generator()) < 0.3
    policy.update_normalizer(obs, ~reset)
    expected = policy.unroll(obs, policy.initial_state(3), reset).value
    policy.cuda()
    on_gpu = tree_map(lambda leaf: leaf.cuda(), obs)
    value = policy.unroll(on_gpu, policy.initial_state(3), reset.cuda()).value
    torch.testing.assert_close(value.cpu(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_a_bfloat16_policy_acts_and_learns_on_a_gpu() -> None:
    policy = make(PONG, compute_dtype="bfloat16").cuda()
    before = torch.cuda.get_rng_state()
    obs = observations(PONG, (3, 2)).cuda()
    on_gpu = torch.Generator("cuda").manual_seed(0)
    action = policy.act(obs[0], {}, generator=on_gpu).action
    assert action.device.type == "cuda"
    loss_of(policy, obs, torch.zeros(3, 2, dtype=torch.int64, device="cuda")).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_what_an_image_says_depends_on_the_numbers_beside_it(core: Any) -> None:
    space = spaces.Dict({"image": PONG, "button": BUTTONS})
    policy = Policy(space, BUTTONS, PolicyConfig(core=core), seed=0)
    images = torch.zeros(1, 2, *PONG.shape, dtype=torch.uint8)  # one black, one white
    images[:, 1] = 255
    values = []
    for button in (0, 1):
        obs = {"image": images, "button": torch.full((1, 2), button)}
        values.append(policy.unroll(obs, policy.initial_state(2), torch.zeros(1, 2).bool()).value)
    effect = (values[1] - values[0]).flatten()
    # Were the two only added up, the button would do the same beside every image.
    assert (effect[0] - effect[1]).abs() > 0.01 * effect.abs().max() > 0


@pytest.mark.parametrize("critic", [spaces.Box(-1, 1, (3,), np.float32), PONG])
def test_a_critic_of_its_own_may_be_wider_or_narrower_than_the_actor(critic: Any) -> None:
    space = spaces.Dict({"actor": OBSERVATIONS["dict"], "critic": critic})
    config = PolicyConfig(critic_group="critic", shared_torso=False)
    policy = Policy(space, BUTTONS, config, seed=0)
    obs = observations(space, (3, 2))
    assert policy.unroll(obs, {}).value.shape == (3, 2)
    assert policy.value(obs).shape == (3, 2)
