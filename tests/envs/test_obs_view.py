"""What a policy is shown: masks of allowed actions, texts as numbers, entries left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from tests.space_envs import ACTIONS
from unirl.core.tree import tree_map
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec, settle_mask
from unirl.envs.make import spaces as spaces_of
from unirl.envs.spaces import action_fields
from unirl.envs.view.masks import mask_writer
from unirl.errors import UniRLError

HYBRID = ACTIONS["hybrid"]
TAXI = next(name for name in ("Taxi-v4", "Taxi-v3") if name in gymnasium.registry)


class Given(gymnasium.Env[Any, Any]):
    """Gives these masks in its info, one after the other; ends after as many steps."""

    masks: Any = ()
    action_space: Any = Discrete(3)
    observation_space: Any = Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.step_number = 0
        return np.zeros(2, np.float32), self._info()

    def step(self, action: Any) -> Any:
        self.step_number += 1
        over = self.step_number == len(self.masks) - 1
        return np.zeros(2, np.float32), 0.0, over, False, self._info()

    def _info(self) -> dict[str, Any]:
        mask = self.masks[self.step_number]
        return {} if mask is None else {"action_mask": mask}


@pytest.fixture
def given() -> Iterator[Callable[..., EnvConfig]]:
    def register(*masks: Any, **attributes: Any) -> EnvConfig:
        made = type("Made", (Given,), {"masks": masks, **attributes})
        gymnasium.register("test/Given-v0", entry_point=made)
        return EnvConfig("test/Given-v0")

    yield register
    gymnasium.registry.pop("test/Given-v0", None)


def masks_of(config: EnvConfig, steps: int, action: Any) -> list[list[int]]:
    env = make_vec(settle_mask(config), 1)
    try:
        found = [env.reset(0)["action_mask"][0].tolist()]
        found += [env.step(action).obs["action_mask"][0].tolist() for _ in range(steps)]
        return found
    finally:
        env.close()


def test_every_row_has_its_mask_also_the_first_of_an_episode(given: Any) -> None:
    config = given([1, 0, 0], np.array([False, True, True]), [0, 0, 0])
    # The end allows everything, whatever its info says: no action follows.
    wanted = [[1, 0, 0], [0, 1, 1], [1, 1, 1], [1, 0, 0], [0, 1, 1]]
    assert masks_of(config, 4, np.zeros(1, np.int64)) == wanted
    assert masks_of(given([1, 0, 0], None), 1, np.zeros(1, np.int64)) == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("space", "mask", "flat"),
    [
        (MultiDiscrete([2, 3]), ([1, 0], [0, 1, 1]), [1, 0, 0, 1, 1]),
        (MultiDiscrete([2, 3]), [1, 0, 0, 1, 1], [1, 0, 0, 1, 1]),
        (MultiDiscrete([2, 2]), [[1, 0], [0, 1]], [1, 0, 0, 1]),
        (MultiBinary(2), [0, 1, 1, 1], [0, 1, 1, 1]),
        (HYBRID, {"move": [0, 1, 0]}, [0, 1, 0] + 4 * [1] + 5 * [1]),
        (HYBRID, {"tools": (None, {"cards": ([1, 0], None)})}, 3 * [1] + 4 * [1] + [1, 0, 1, 1, 1]),
    ],
    ids=str,
)
def test_masks_come_in_the_structure_of_the_action(
    space: Any, mask: Any, flat: Any, given: Any
) -> None:
    config = given(mask, mask, action_space=space)
    env = make_vec(settle_mask(config), 1)
    assert env.reset(0)["action_mask"][0].tolist() == flat
    env.close()


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        (([1, 1, 1], [0, 0, 0], [1, 1, 1]), "allows no action"),
        (([1, 1, 1], [1, 1], [1, 1, 1]), "does not fit"),
        (([1, 1, 1], None, [1, 1, 1]), "gave no info"),
    ],
)
def test_a_mask_that_cannot_be_obeyed_is_an_error_that_names_the_environment(
    masks: Any, said: str, given: Any
) -> None:
    env = make_vec(settle_mask(given(*masks)), 1)
    env.reset(0)
    with pytest.raises(UniRLError, match=said) as caught:
        env.step(np.zeros(1, np.int64))
    assert "test/Given-v0" in caught.value.what and len(caught.value.parts) == 3
    env.close()


def test_a_dictionary_is_no_mask_of_choices_without_names() -> None:
    write = mask_writer(MultiDiscrete([2, 2]), "test/Given-v0")
    with pytest.raises(UniRLError, match="does not fit"):
        write({"left": [1, 0], "right": [1, 1]}, np.ones(4, np.int8))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"action_mask": "legal"}, "must name an entry"),
        ({"drop_observations": ("mission",)}, "no observation mission"),
        ({"action_mask": "info", "random_burst_probability": 0.1}, "cannot have random-action"),
    ],
)
def test_a_setting_that_the_environment_does_not_fit_is_refused(
    setting: Any, said: str, given: Any
) -> None:
    config = given([1, 1, 1], [1, 1, 1])
    with pytest.raises(UniRLError, match=said) as caught:
        make_vec(EnvConfig(config.id, **setting), 1)
    assert len(caught.value.parts) == 3


def test_auto_finds_the_mask_and_none_leaves_it_alone(given: Any) -> None:
    config = given([1, 1, 1], [1, 1, 1])
    assert settle_mask(EnvConfig(config.id, action_mask="none")).action_mask == "none"
    assert spaces_of(EnvConfig(config.id, action_mask="none"))[0] == Given.observation_space
    assert settle_mask(EnvConfig("FrozenLake-v1")).action_mask == "none"
    assert settle_mask(EnvConfig(TAXI)).action_mask == "info"
    assert settle_mask(EnvConfig("Pendulum-v1")).action_mask == "none"


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_taxi_is_masked_from_its_first_row_on(engine: Any) -> None:
    env = make_vec(EnvConfig(TAXI, engine, max_episode_steps=3, action_mask="info"), 2)
    taxi: Any = gymnasium.make(TAXI).unwrapped
    obs, random, ended = env.reset(3), np.random.default_rng(0), False
    for _ in range(9):
        for state, mask in zip(obs["obs"], obs["action_mask"], strict=True):
            assert mask.tolist() == taxi.action_mask(state).tolist() or ended
        legal = np.array([random.choice(np.flatnonzero(mask)) for mask in obs["action_mask"]])
        step = env.step(legal)
        obs, ended = step.obs, bool((step.terminated | step.truncated).any())
    env.close()


@pytest.mark.parametrize("engine", ["sync", "async"])
@pytest.mark.parametrize("action", ["hybrid", "tuple", "matrix of bits"])
def test_an_environment_gets_actions_in_its_own_structure_and_dtypes(
    action: str, engine: Any
) -> None:
    module, space = "tests.space_envs", ACTIONS[action]
    config = EnvConfig("unirl-test/Match-v0", engine, kwargs={"action": action})
    env = make_vec(replace(config, import_module=module, last_action=True), 2)
    assert (env.reset(0)["obs"] != 0).any()
    zeros = tree_map(
        lambda leaf: torch.zeros(leaf[0], dtype=leaf[1]).numpy(), action_fields(space, 2)
    )
    before = tree_map(np.copy, zeros)
    seen = env.step(zeros).obs["last_action"]  # the environment checks what it gets
    env.close()
    for kept in (zeros, seen):
        tree_map(np.testing.assert_array_equal, before, kept)


class Stepper(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A vector class whose observations have an entry that is a mask."""

    def __init__(self, num_envs: int = 1, in_info: bool = False) -> None:
        self.num_envs, self._in_info = num_envs, in_info
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        entries = {"seen": Box(-1, 1, (2,), np.float32), "legal": Box(0, 1, (3,), np.uint8)}
        self.single_observation_space = Dict({**entries, "note": Text(3)})
        self.single_action_space = Discrete(3)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._obs(), {"action_mask": 0} if self._in_info else {}

    def step(self, actions: Any) -> Any:
        no = np.zeros(self.num_envs, np.bool_)
        return self._obs(), np.zeros(self.num_envs), no, no, {}

    def _obs(self) -> Any:
        legal = np.tile(np.uint8([0, 1, 1]), (self.num_envs, 1))
        seen = np.zeros((self.num_envs, 2), np.float32)
        return {"seen": seen, "legal": legal, "note": ("",) * self.num_envs}


def test_a_vector_class_is_masked_by_an_entry_and_refused_where_its_info_has_masks() -> None:
    gymnasium.register("test/Stepper-v0", vector_entry_point=Stepper)
    try:
        config = EnvConfig("test/Stepper-v0", action_mask="legal", drop_observations=("note",))
        env = make_vec(config, 2)
        obs = env.reset(0)
        assert sorted(obs) == ["legal", "seen"] and obs["legal"].tolist() == [[0, 1, 1]] * 2
        env.close()
        dropping = {"drop_observations": ("note",), "kwargs": {"in_info": True}}
        with pytest.raises(UniRLError, match="engine auto cannot use"):
            make_vec(EnvConfig("test/Stepper-v0", **dropping), 2).reset(0)
        with pytest.raises(UniRLError, match="action_mask info cannot be read"):
            make_vec(EnvConfig("test/Stepper-v0", action_mask="info", **dropping), 2)
        with pytest.raises(UniRLError, match=r'env.drop_observations = \["note"\]'):
            make_vec(EnvConfig("test/Stepper-v0"), 2)
    finally:
        gymnasium.registry.pop("test/Stepper-v0")


@pytest.mark.parametrize("action", ["hybrid", "discrete"])
def test_an_agent_that_waits_may_do_anything_and_acts_in_its_own_structure(action: str) -> None:
    config = EnvConfig("pettingzoo/tests.space_envs:Turns", kwargs={"action": action})
    env = make_vec(config, 2)
    masks = [env.reset(0)["action_mask"].tolist()]
    zeros: Any = np.zeros(2, np.int64)
    if action == "hybrid":
        card, bits = {"cards": np.zeros((2, 2), np.int64)}, np.zeros((2, 2), np.int64)
        zeros = {
            "tools": {"0": bits, "1": card},
            "move": zeros,
            "aim": np.zeros((2, 2), np.float32),
        }
    masks += [env.step(zeros).obs["action_mask"].tolist() for _ in range(4)]
    env.close()
    if action == "discrete":
        turn_of = [[[1, 0, 0], [1, 1, 1]], [[1, 1, 1], [1, 0, 0]]]
        over, first = [[1, 1, 1], [1, 1, 1]], turn_of[0]
        assert masks == [turn_of[0], turn_of[1], turn_of[0], over, first]


def test_a_text_is_its_characters_in_order_and_what_is_dropped_is_gone() -> None:
    config = EnvConfig(
        "unirl-test/Words-v0",
        import_module="tests.space_envs",
        drop_observations=("mission", "given/mission"),
    )
    env = make_vec(config, 1)
    assert env.observation_space == Dict({"given": Dict({"word": MultiDiscrete([5, 5, 5])})})
    word = env.reset(0)["given"]["word"][0]
    assert all(1 <= letter <= 4 for letter in word[:2]) and 0 <= word[2] <= 4
    env.close()
    with pytest.raises(UniRLError, match=r'env.drop_observations = \["given/mission"\]') as caught:
        make_vec(EnvConfig(config.id, import_module=config.import_module), 1)
    assert len(caught.value.parts) == 3


def test_texts_outside_of_their_space_are_refused(given: Any) -> None:
    env = make_vec(given(None, None, observation_space=Text(2)), 1)
    with pytest.raises(UniRLError, match="outside of its space"):
        env.reset(0)
    env.close()
    for space in (Text(300), spaces.Sequence(Discrete(2)), Tuple((Text(300),))):
        with pytest.raises(UniRLError, match="unsupported observation space"):
            make_vec(given(None, None, observation_space=space), 1)


def test_a_first_reset_that_hangs_is_given_up_and_one_that_fails_is_left_to_the_actors(
    given: Any,
) -> None:
    def hang(self: Any, **_: Any) -> Any:
        time.sleep(2.0)

    with pytest.raises(UniRLError, match=r"was not made within 0\.1 s: it hung in"):
        settle_mask(replace(given(None, reset=hang), make_timeout=0.1))
    assert settle_mask(given(reset=Given._info)).action_mask == "auto"
