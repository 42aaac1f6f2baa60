"""Observations and actions of every supported space reach slots and environments unharmed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from unirl.core.sample import Field, SampleSpec
from unirl.core.tree import flatten
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.spaces import action_fields, action_writer, obs_fields, obs_reader, write_obs
from unirl.errors import UniRLError

NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (2, 4, 4), np.uint8),
        "joints": spaces.Box(-1.0, 1.0, (3,), np.float64),
        "room": spaces.Discrete(5, start=10),
        "cards": spaces.MultiDiscrete([3, 4]),
        "lamps": spaces.MultiBinary(6),
        "pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,), np.float32))),
    }
)


class Echo(gymnasium.Env[Any, Any]):
    """Draws observations from a space, and keeps the last action it was given."""

    def __init__(self, space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = space, action_space
        self.drawn: list[Any] = []
        self.received: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self._draw(), {}

    def step(self, action: Any) -> Any:
        self.received.append(action)
        return self._draw(), 0.5, False, False, {}

    def _draw(self) -> Any:
        self.drawn.append(self.observation_space.sample())
        return self.drawn[-1]


@pytest.fixture
def echo() -> Iterator[Any]:
    """Registers an Echo of given spaces; the made environments are listed in `echo.made`."""

    class Registered:
        def __init__(self) -> None:
            self.made: list[Echo] = []

        def __call__(self, space: Any, action_space: Any = None) -> str:
            def build(**kwargs: Any) -> Echo:
                self.made.append(Echo(space, action_space or spaces.Discrete(2)))
                return self.made[-1]

            gymnasium.register("test/Echo-v0", entry_point=build)
            return "test/Echo-v0"

    registered = Registered()
    yield registered
    gymnasium.registry.pop("test/Echo-v0", None)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), (4, 84, 84), torch.uint8),
        (spaces.Box(-1.0, 1.0, (3,), np.float32), (3,), torch.float32),
        (spaces.Box(-1.0, 1.0, (3,), np.float64), (3,), torch.float32),
        (spaces.Box(0, 60000, (2,), np.uint16), (2,), torch.int32),
        (spaces.Box(-5, 5, (), np.int64), (), torch.int64),
        (spaces.Discrete(7), (), torch.int64),
        (spaces.MultiDiscrete([2, 3]), (2,), torch.int64),
        (spaces.MultiBinary(4), (4,), torch.int64),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["sync", "async"])
def test_a_leaf_space_travels_from_environment_to_slot(
    space: Any, shape: Any, dtype: Any, engine: Any, echo: Any
) -> None:
    assert obs_fields(space, 2) == ((2, *shape), dtype)
    env = make_vec(EnvConfig(echo(space), engine), 2)
    try:
        env.reset(0)
        obs = env.step(np.zeros(2, dtype=np.int64)).obs
        slot = torch.zeros((2, *shape), dtype=dtype)
        write_obs(slot, obs)
        assert torch.from_numpy(np.asarray(obs)).dtype == dtype
        if engine == "sync":
            for i in range(2):
                drawn = echo.made[i].drawn[-1]
                assert np.allclose(slot[i].numpy(), drawn, rtol=1e-6), space
    finally:
        env.close()


def test_a_nested_space_becomes_a_tree_that_a_slot_can_hold(echo: Any) -> None:
    env = make_vec(EnvConfig(echo(NESTED)), 3)
    fields = obs_fields(env.observation_space, 3)
    flat = {name: Field(*leaf, batch_axis=0) for name, leaf in _flatten(fields).items()}
    slot = SampleSpec(flat).allocate()
    obs = env.reset(1)
    write_obs(slot, obs)
    written = flatten(slot)
    assert sorted(written) == [
        "camera",
        "cards",
        "joints",
        "lamps",
        "pair/0",
        "pair/1",
        "room",
    ]
    for i in range(3):
        drawn = echo.made[i].drawn[-1]
        assert (written["camera"][i].numpy() == drawn["camera"]).all()
        assert np.allclose(written["joints"][i].numpy(), drawn["joints"], rtol=1e-6)
        assert written["room"][i] == drawn["room"] - 10, "Discrete is counted from 0"
        assert (written["cards"][i].numpy() == drawn["cards"]).all()
        assert (written["lamps"][i].numpy() == drawn["lamps"]).all()
        assert written["pair/0"][i] == drawn["pair"][0]
        assert written["pair/1"][i].item() == drawn["pair"][1]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, tuple):
        return {prefix: tree}
    return {
        name: leaf
        for key, child in tree.items()
        for name, leaf in _flatten(child, f"{prefix}/{key}" if prefix else key).items()
    }


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Dict({"note": spaces.Text(3)}),
    ],
    ids=lambda space: type(space).__name__,
)
def test_an_unsupported_observation_space_is_named_with_the_supported_ones(space: Any) -> None:
    with pytest.raises(UniRLError, match="Box, Discrete, MultiDiscrete") as caught:
        obs_fields(space, 2, "my/Env-v0")
    assert len(caught.value.parts) == 3
    assert "my/Env-v0" in caught.value.what


def test_making_an_environment_refuses_its_unsupported_space(echo: Any) -> None:
    with pytest.raises(UniRLError, match="supported are Discrete, MultiDiscrete"):
        make_vec(EnvConfig(echo(spaces.Discrete(2), spaces.Text(3))), 1)
    for space in (spaces.Box(0, 5, (2,), np.int32), spaces.MultiDiscrete([[2, 2], [2, 2]])):
        with pytest.raises(UniRLError, match="supported are Discrete, MultiDiscrete"):
            action_fields(space, 1)


def test_a_name_that_would_split_a_slots_path_is_refused() -> None:
    with pytest.raises(UniRLError, match="must not contain"):
        obs_fields(spaces.Dict({"arm/left": spaces.Discrete(2)}), 1)


@pytest.mark.parametrize(
    ("space", "action", "received"),
    [
        (spaces.Discrete(3, start=-1), np.array([0, 2]), [-1, 1]),
        (spaces.MultiDiscrete([2, 3], start=[5, 0]), np.array([[0, 2], [1, 0]]), [[5, 2], [6, 0]]),
        (
            spaces.Box(-1.0, np.array([1.0, np.inf], np.float32), (2,), np.float32),
            np.array([[-3.0, 9.0], [0.25, -0.5]], np.float32),
            [[-1.0, 9.0], [0.25, -0.5]],
        ),
    ],
    ids=str,
)
def test_environments_receive_legal_actions_and_the_sample_stays_as_drawn(
    space: Any, action: Any, received: Any, echo: Any
) -> None:
    env = make_vec(EnvConfig(echo(spaces.Discrete(2), space)), 2)
    env.reset(0)
    drawn = action.copy()
    env.step(action)
    assert (action == drawn).all()
    for i in range(2):
        assert np.asarray(echo.made[i].received[-1]).tolist() == received[i]
        assert space.contains(echo.made[i].received[-1])
    shape, dtype = action_fields(space, 2)
    assert action.shape == shape
    assert torch.from_numpy(action).dtype == dtype


def test_float64_bounds_are_met_exactly() -> None:
    space = spaces.Box(-0.1, 0.1, (1,), np.float64)  # float32(0.1) is above 0.1
    legal = action_writer(space, 1)(np.array([[0.1]], dtype=np.float32))
    assert legal.dtype == np.float64
    assert space.contains(legal[0])


def test_a_reader_hands_an_array_through_without_a_copy() -> None:
    array = np.zeros((4, 3), dtype=np.float32)
    assert obs_reader(spaces.Box(-1.0, 1.0, (3,), np.float32))(array, 4) is array


def test_a_reader_names_expected_and_received_shape() -> None:
    read = obs_reader(NESTED, "my/Env-v0")
    good = gymnasium.vector.utils.batch_space(NESTED, 2).sample()
    read(good, 2)
    with pytest.raises(UniRLError, match=r"\(2, 3\), received \(2, 4\)"):
        read({**good, "joints": np.zeros((2, 4))}, 2)
    with pytest.raises(UniRLError, match="wrong structure"):
        read({key: leaf for key, leaf in good.items() if key != "joints"}, 2)


def test_writing_accepts_arrays_that_are_read_only_or_strided() -> None:
    frozen = np.arange(6, dtype=np.float32).reshape(2, 3)
    frozen.flags.writeable = False
    slot = torch.zeros(3, 2, 3)
    write_obs(slot[1], frozen)
    assert slot[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    write_obs(slot[2], np.asfortranarray(frozen))
    assert slot[2].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not slot[0].any()
