"""Each agent of a parallel environment is a row: it may die, be absent and join, row by row as by
hand; and a policy learns from such rows."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from hypothesis import given
from hypothesis import strategies as st

import unirl
from tests import forked
from tests.toy_envs import CountingAgents
from unirl.actors.evaluate import make_evaluator
from unirl.actors.vector import ActorConfig, make_vector_actor, unroll_spec
from unirl.core.actor import ActorContext
from unirl.core.queue import QueueConfig
from unirl.core.sample import Slot
from unirl.core.tree import flatten
from unirl.envs.config import EnvConfig
from unirl.envs.games.duel import Duel
from unirl.envs.make import agents_of, known_env_ids, make_vec, spaces
from unirl.envs.multi_agent.parallel import ParallelEnvs
from unirl.envs.vector import env_seeds
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig
from unirl.storage.checkpoint import load_checkpoint
from unirl.transports.local import LocalWeightStore

COUNTING = EnvConfig("pettingzoo/tests.toy_envs:CountingAgents")
DUEL = EnvConfig("pettingzoo/unirl/Duel")
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("pettingzoo") is None, reason="the extra multiagent is not installed"
)

# CountingAgents by hand. Of episode 0 agent 0 terminates after 2 steps, agent 1 after 4, agent 2 is
# truncated after 3; of episode 1 agent 0 is truncated after 1 step, agent 1 is absent, agent 2
# terminates after 2. One line per row, for each agent: observation after it, reward, and one of
# "." it continues, "T" terminated, "C" cut off, "-" filler.
NOTHING = (0, 0, 0)
FROM_EPISODE_0 = [
    (((0, 0, 1), 1, "."), ((1, 0, 1), 1, "."), ((2, 0, 1), 1, ".")),
    (((0, 0, 2), 2, "T"), ((1, 0, 2), 2, "."), ((2, 0, 2), 2, ".")),
    ((NOTHING, 0, "-"), ((1, 0, 3), 3, "."), ((2, 0, 3), 3, "C")),
    ((NOTHING, 0, "-"), ((1, 0, 4), 4, "T"), (NOTHING, 0, "-")),
    (((0, 1, 0), 0, "-"), (NOTHING, 0, "-"), ((2, 1, 0), 0, "-")),  # the reset
    (((0, 1, 1), 1, "C"), (NOTHING, 0, "-"), ((2, 1, 1), 1, ".")),
    ((NOTHING, 0, "-"), (NOTHING, 0, "-"), ((2, 1, 2), 2, "T")),
    (((0, 2, 0), 0, "-"), ((1, 2, 0), 0, "-"), ((2, 2, 0), 0, "-")),  # the reset
    (((0, 2, 1), 1, "."), ((1, 2, 1), 1, "."), ((2, 2, 1), 1, ".")),
]
FROM_EPISODE_1 = [
    (((0, 1, 1), 1, "C"), (NOTHING, 0, "-"), ((2, 1, 1), 1, ".")),
    ((NOTHING, 0, "-"), (NOTHING, 0, "-"), ((2, 1, 2), 2, "T")),
    (((0, 2, 0), 0, "-"), ((1, 2, 0), 0, "-"), ((2, 2, 0), 0, "-")),  # the reset
    (((0, 2, 1), 1, "."), ((1, 2, 1), 1, "."), ((2, 2, 1), 1, ".")),
    (((0, 2, 2), 2, "T"), ((1, 2, 2), 2, "."), ((2, 2, 2), 2, ".")),
    ((NOTHING, 0, "-"), ((1, 2, 3), 3, "."), ((2, 2, 3), 3, "C")),
    ((NOTHING, 0, "-"), ((1, 2, 4), 4, "T"), (NOTHING, 0, "-")),
    (((0, 3, 0), 0, "-"), (NOTHING, 0, "-"), ((2, 3, 0), 0, "-")),  # the reset
    (((0, 3, 1), 1, "C"), (NOTHING, 0, "-"), ((2, 3, 1), 1, ".")),
]


def rows_of(env: Any, num_steps: int) -> list[list[Any]]:
    """The rows in the notation above."""
    found = []
    for _ in range(num_steps):
        step = env.step(np.zeros(env.num_envs, dtype=np.int64))
        assert step.acting_obs is step.obs
        assert not (step.terminated & step.truncated).any()
        assert not ((step.terminated | step.truncated) & ~step.mask).any()
        marks = np.where(step.terminated, "T", np.where(step.truncated, "C", "."))
        marks = np.where(step.mask, marks, "-").tolist()
        obs = [tuple(map(int, row)) for row in step.obs]
        found.append(list(zip(obs, step.reward.tolist(), marks, strict=True)))
    return found


def test_dying_and_absent_agents_row_by_row() -> None:
    # Two environments, the second of which begins with episode 1.
    seed = next(s for s in range(100) if [n % 2 for n in env_seeds(s, 2)] == [0, 1])
    env = make_vec(replace(COUNTING, kwargs={"stagger": True}), 6)
    assert env.agents == ("counter_0", "counter_1", "counter_2")  # type: ignore[attr-defined]
    assert env.observation_space.shape == (3,) and not env.hides_first_obs
    first = [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0], [0, 0, 0], [2, 1, 0]]
    expected = [[*a, *b] for a, b in zip(FROM_EPISODE_0, FROM_EPISODE_1, strict=True)]
    assert env.reset(seed).tolist() == first
    assert rows_of(env, 9) == expected
    assert env.reset(seed).tolist() == first, "a second reset starts over, without fillers"
    assert rows_of(env, 9) == expected
    env.close()
    env.close()


@given(
    st.lists(
        st.lists(st.integers(-4, 4), min_size=3, max_size=3).filter(any), min_size=1, max_size=3
    )
)
def test_any_lifetimes_give_the_rows_that_the_rule_says(lifetimes: list[list[int]]) -> None:
    env = make_vec(replace(COUNTING, kwargs={"lifetimes": lifetimes}), 3)
    env.reset(0)
    expected: list[Any] = []
    for episode in range(4):
        lives = lifetimes[episode % len(lifetimes)]
        longest, after = max(map(abs, lives)), lifetimes[(episode + 1) % len(lifetimes)]
        for t in range(1, longest + 1):
            row = []
            for agent, life in enumerate(lives):
                ends = {abs(life): "T" if life > 0 else "C"}
                alive = ((agent, episode, t), t, ends.get(t, "."))
                row.append(alive if t <= abs(life) else (NOTHING, 0, "-"))
            expected.append(row)
        present = [(i, episode + 1, 0) if life else NOTHING for i, life in enumerate(after)]
        expected.append([(obs, 0, "-") for obs in present])
    assert rows_of(env, len(expected)) == expected


def test_an_agent_that_vanishes_silently_is_truncated_with_its_last_observation() -> None:
    env = make_vec(replace(COUNTING, kwargs={"silent": True, "lifetimes": [[1, 3]]}), 2)
    env.reset(0)
    assert rows_of(env, 6) == [
        [((0, 0, 0), 0, "C"), ((1, 0, 1), 1, ".")],
        [(NOTHING, 0, "-"), ((1, 0, 2), 2, ".")],
        [(NOTHING, 0, "-"), ((1, 0, 2), 0, "C")],
        [((0, 1, 0), 0, "-"), ((1, 1, 0), 0, "-")],
        [((0, 1, 0), 0, "C"), ((1, 1, 1), 1, ".")],
        [(NOTHING, 0, "-"), ((1, 1, 2), 2, ".")],
    ]


def test_a_limit_truncates_all_who_are_left() -> None:
    lifetimes = [[1, 9, -2, 2]]
    config = replace(COUNTING, kwargs={"lifetimes": lifetimes}, max_episode_steps=2)
    env = make_vec(config, 4)
    env.reset(0)
    marks = [[mark for _, _, mark in row] for row in rows_of(env, 5)]
    assert marks == [list("T..."), list("-CCT"), list("----"), list("T..."), list("-CCT")]
    silent = make_vec(replace(config, kwargs={"lifetimes": lifetimes, "silent": True}), 4)
    silent.reset(0)
    assert [[mark for _, _, mark in row] for row in rows_of(silent, 3)][:2] == [
        list("C..."),
        list("-CCC"),
    ]


class Scripted:
    """Plays a list of steps: who is there after it, and what is said of whom; the first is reset's.

    Its steps take "name: observation" as given; rewards, ends and cuts only where they are named.
    """

    def __init__(self, *script: dict[str, Any], space: Any = None) -> None:
        self.possible_agents, self.agents = ["a", "b"], list[str]()
        self._script, self._t, self.seen = script, 0, list[Any]()
        self._space = space or Box(0.0, 100.0, (1,), np.float32)

    def observation_space(self, agent: str) -> Any:
        return self._space

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self._t = 0
        return self._play()[0], {}

    def step(self, actions: Any) -> Any:
        self.seen.append(sorted(actions))
        self._t += 1
        return self._play()

    def _play(self) -> Any:
        now = self._script[self._t]
        self.agents = list(now["agents"])
        reward = now.get("reward", dict.fromkeys("ab", 1.0))
        return now["obs"], reward, now.get("ended", {}), now.get("cut", {}), {}

    def close(self) -> None:
        self.seen.append("closed")


def number(value: float) -> Any:
    return np.array([value], np.float32)


def scripted(*script: dict[str, Any], **settings: Any) -> tuple[ParallelEnvs, Scripted]:
    made = Scripted(*script, **settings)
    return ParallelEnvs(EnvConfig("pettingzoo/my.games:make"), lambda: made, 2), made


def test_an_agent_that_joins_or_comes_back_has_its_first_observation_in_the_filler_before() -> None:
    env, made = scripted(
        {"agents": "a", "obs": {"a": number(1)}},
        {"agents": "ab", "obs": {"a": number(2), "b": number(20)}},  # b joins
        {"agents": "a", "obs": {"a": number(3), "b": number(30)}, "ended": {"b": True}},
        {"agents": "ab", "obs": {"a": number(4), "b": number(40)}},  # and comes back
        {"agents": "", "obs": {"a": number(5), "b": number(50)}, "cut": {"a": True, "b": True}},
    )
    assert env.reset(0).tolist() == [[1], [0]]
    steps = []
    for _ in range(5):
        step = env.step(np.zeros(2, np.int64))
        steps.append((step.obs[:, 0].tolist(), step.mask.tolist(), step.reward.tolist()))
    t, f = True, False
    assert steps == [
        ([2, 20], [t, f], [1, 0]),
        ([3, 30], [t, t], [1, 1]),
        ([4, 40], [t, f], [1, 0]),
        ([5, 50], [t, t], [1, 1]),
        ([1, 0], [f, f], [0, 0]),
    ]
    assert made.seen == [["a"], ["a", "b"], ["a"], ["a", "b"]]


def test_an_environment_that_keeps_listing_who_ended_is_over_when_all_have() -> None:
    # What it lists must act, since it will look their actions up; their rows are fillers all the
    # same.
    both = {"a": number(1), "b": number(2)}
    env, made = scripted(
        {"agents": "ab", "obs": both},
        {"agents": "ab", "obs": both, "ended": {"a": True, "b": False}},
        {"agents": "ab", "obs": both, "ended": {"a": True, "b": True}},
    )
    env.reset(0)
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(4)]
    assert [step.mask.tolist() for step in steps] == [
        [True, True], [False, True], [False, False], [True, True],
    ]  # fmt: skip
    assert [step.terminated.tolist() for step in steps[:3]] == [
        [True, False], [False, True], [False, False],
    ]  # fmt: skip
    assert made.seen == [["a", "b"]] * 3


def test_nested_observations_keep_their_structure_and_absent_agents_see_the_least_value() -> None:
    space = Dict({"x": Box(0, 255, (2, 2), np.uint8), "y": Tuple([Discrete(3, start=5)])})
    one = {"x": np.full((2, 2), 7, np.uint8), "y": (np.int64(6),)}
    env, _ = scripted(
        {"agents": "a", "obs": {"a": one}},
        {"agents": "b", "obs": {"b": one, "a": one}, "cut": {"a": True}},
        {"agents": "", "obs": {"b": one}, "cut": {"b": True}},
        space=space,
    )
    obs = env.reset(0)
    assert obs["x"].dtype == np.uint8 and obs["x"][:, 0, 0].tolist() == [7, 0]
    assert obs["y"]["0"].tolist() == [1, 0]
    obs = env.step(np.zeros(2, np.int64)).obs
    assert obs["x"][:, 0, 0].tolist() == [7, 7] and obs["y"]["0"].tolist() == [1, 1]
    obs = env.step(np.zeros(2, np.int64)).obs
    assert obs["x"][:, 0, 0].tolist() == [0, 7] and obs["y"]["0"].tolist() == [0, 1]


BOTH = {"a": number(1), "b": number(2)}
BEGIN = {"agents": "ab", "obs": BOTH}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([{"agents": "", "obs": {}}], "began an episode without agents"),
        ([{"agents": "ab", "obs": {"a": number(1)}}], "no observation for agent b"),
        ([{"agents": "abc", "obs": BOTH}], "did not announce: c"),
        ([BEGIN, {"agents": "ab", "obs": {"b": number(1)}}], "no observation for agent a"),
        ([BEGIN, {"agents": "ab", "obs": BOTH, "reward": {"a": 1.0}}], "no reward for agent b"),
        (
            [BEGIN, {"agents": "ab", "obs": {"a": 1.0, "b": number(2)}}],
            r"promises \(1,\), received \(\)",
        ),
        (
            [BEGIN, {"agents": "ab", "obs": {"a": np.zeros(3), "b": number(2)}}],
            r"promises \(1,\), received \(3,\)",
        ),
    ],
)
def test_what_an_environment_must_not_do_is_named(script: Any, message: str) -> None:
    env, _ = scripted(*script)
    with pytest.raises(UniRLError, match=message) as caught:
        env.reset(0)
        env.step(np.zeros(2, np.int64))
    assert len(caught.value.parts) == 3 and "pettingzoo/my.games:make" in caught.value.what


def test_a_missing_part_of_an_observation_is_named() -> None:
    space = Dict({"x": Dict({"y": Box(0, 1, (2,))})})
    env, _ = scripted({"agents": "a", "obs": {"a": {"x": {"z": 1}}}}, space=space)
    with pytest.raises(UniRLError, match="without x/y") as caught:
        env.reset(0)
    assert len(caught.value.parts) == 3


def test_an_exception_of_an_environment_propagates_and_all_are_closed() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(Scripted(BEGIN))
        return made[-1]

    env = ParallelEnvs(EnvConfig("pettingzoo/my.games:make"), make, 6)
    env.reset(0)
    with pytest.raises(IndexError):
        env.step(np.zeros(6, np.int64))
    env.close()
    env.close()
    assert [game.seen[-1] for game in made] == ["closed"] * 3
    assert sum(game.seen.count("closed") for game in made) == 3

    def fail() -> Any:
        if len(made) == 5:
            raise RuntimeError("no more")
        return make()

    with pytest.raises(RuntimeError, match="no more"):
        ParallelEnvs(EnvConfig("pettingzoo/my.games:make"), fail, 8)
    assert [game.seen for game in made[3:]] == [["closed"]] * 2, "nothing is left open"


def test_an_environment_that_fails_to_close_keeps_no_other_one_open() -> None:
    made: list[Any] = []

    class Clinging(Scripted):
        def close(self) -> None:
            super().close()
            raise OSError("it clings")

    def make() -> Any:
        made.append(Clinging(BEGIN))
        return made[-1]

    env = ParallelEnvs(EnvConfig("pettingzoo/my.games:make"), make, 4)
    with pytest.raises(OSError, match="it clings"):
        env.close()
    assert [game.seen for game in made] == [["closed"]] * 2


def test_every_environment_has_a_seed_of_its_own() -> None:
    env, again = make_vec(DUEL, 16), make_vec(DUEL, 16)
    first = env.reset(3).copy()
    assert (again.reset(3) == first).all()
    assert len(np.unique(first[::2], axis=0)) > 4
    assert (first[::2] == first[1::2, ::-1]).all(), "both see it from their own side"
    assert (again.reset(4) != first).any()
    random = np.random.default_rng(1)
    env.reset(3)
    again.reset(3)
    for _ in range(60):  # through several episodes
        action = random.integers(0, 3, 16)
        assert (env.step(action).obs == again.step(action).obs).all()
    assert (env.reset(3) == first).all()


# -- names -----------------------------------------------------------------------------------------

MY_GAMES = """
from unirl.envs.games.duel import Duel
from gymnasium.spaces import Box, Discrete

def make_duel(length):
    return Duel(length)

class Unequal(Duel):
    def action_space(self, agent):
        return Discrete(3 if agent == "left" else 4)

class Big(Duel):
    def observation_space(self, agent):
        return Box(0, 1, (2 if agent == "left" else 3,))

class Nobody(Duel):
    def __init__(self):
        super().__init__()
        self.possible_agents = []

class InTurns(Duel):
    def agent_iter(self): ...

number = 5
"""


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EnvConfig]:
    (tmp_path / "my_games_for_test.py").write_text(MY_GAMES)
    (tmp_path / "lacking_games_for_test.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, **kwargs: EnvConfig(f"pettingzoo/{name}", kwargs=kwargs)


def test_a_factory_of_ones_own_is_named_by_module_and_function(games: Any) -> None:
    config = games("my_games_for_test:make_duel", length=3)
    assert agents_of(config) == ("left", "right")
    assert spaces(config)[1] == Discrete(3)
    obs = make_vec(config, 4).reset(0)
    assert obs.shape == (4, 2) and set((obs * 3).round().ravel()) <= {-2.0, -1.0, 1.0, 2.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_games_for_test:Unequal", r"different action spaces.*Discrete\(3\).*Discrete\(4\)"),
        ("my_games_for_test:Big", "different observation spaces"),
        ("my_games_for_test:Nobody", "does not say who may act"),
        ("my_games_for_test:InTurns", "act in turns"),
        ("my_games_for_test:make_deul", '"make_deul" is not there'),
        ("my_games_for_test:number", '"number" is not there'),
        ("my_gams_for_test:make_duel", 'module "my_gams_for_test" .* was not found'),
        ("lacking_games_for_test:make", "pip install not_there_at_all"),
        (":make_duel", "names no factory"),
        ("my_games_for_test:", "names no factory"),
        (".my_games_for_test:make_duel", "names no factory"),
        ("unirl/Deul", 'Did you mean "pettingzoo/unirl/Duel"'),
    ],
)
def test_a_name_that_makes_no_parallel_environment_is_explained(
    games: Any, name: str, message: str
) -> None:
    with pytest.raises(UniRLError, match=message) as caught:
        make_vec(games(name), 2)
    assert len(caught.value.parts) == 3
    with pytest.raises(UniRLError, match=message):
        spaces(games(name))


def test_arguments_that_an_environment_does_not_take_are_named() -> None:
    with pytest.raises(UniRLError, match=r"does not take these arguments: \['lenght'\]"):
        make_vec(replace(DUEL, kwargs={"lenght": 3}), 2)


@pytest.mark.parametrize(
    ("config", "num_rows", "remedy"),
    [(DUEL, 5, "4 or 6"), (DUEL, 1, "set num_envs to 2"), (COUNTING, 8, "6 or 9")],
)
def test_rows_must_hold_whole_environments(config: EnvConfig, num_rows: int, remedy: str) -> None:
    with pytest.raises(UniRLError, match=f"{num_rows} rows.*{remedy}") as caught:
        make_vec(config, num_rows)
    assert len(caught.value.parts) == 3


@pytest.mark.parametrize("engine", ["vector", "async", "envpool", "ale"])
def test_no_other_engine_runs_several_agents(engine: Any) -> None:
    with pytest.raises(UniRLError, match=f"engine {engine} cannot run") as caught:
        replace(DUEL, engine=engine)
    assert len(caught.value.parts) == 3


def test_environments_with_one_agent_have_no_agents_to_name() -> None:
    assert agents_of(EnvConfig("CartPole-v1")) == ()


@needs_package
def test_the_list_of_ids_holds_the_games_that_are_there() -> None:
    ids = known_env_ids()
    assert {DUEL.id, "pettingzoo/classic/rps_v2", "CartPole-v1"} <= set(ids)
    assert "pettingzoo/classic/chess_v6" not in ids, "its agents act in turns"
    assert ids == sorted(set(ids))


@needs_package
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("classic/rsp_v2", 'Did you mean "pettingzoo/classic/rps_v2"'),
        ("clasic/rps_v2", 'Did you mean "pettingzoo/classic/rps_v2"'),
        ("classic/rps_v2/x", "is unknown"),
        ("", "is unknown"),
        ("mpe/simple_v3", "cannot be imported.*MPE2"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_unknown_game_is_explained(name: str, message: str) -> None:
    with pytest.raises(UniRLError, match=message) as caught:
        make_vec(EnvConfig(f"pettingzoo/{name}"), 2)
    assert len(caught.value.parts) == 3


def make_without(missing: Sequence[str], env_ids: Sequence[str]) -> None:
    """Make environments where packages are missing, and print what is said."""
    warnings.simplefilter("ignore")
    for name in missing:
        assert name not in sys.modules
        sys.modules[name] = None  # type: ignore[assignment]
    print("pettingzoo/unirl/Duel" in known_env_ids(), "CartPole-v1" in known_env_ids())
    make_vec(EnvConfig("pettingzoo/unirl/Duel"), 2).reset(0)
    for env_id in env_ids:
        try:
            make_vec(EnvConfig(env_id), 2)
        except UniRLError as error:
            print(len(error.parts), error.remedy)


def test_a_missing_package_names_what_installs_it(tmp_path: Path) -> None:
    # In a process of its own, where the packages cannot be imported, as if they were not installed.
    output = tmp_path / "said.txt"

    def said(missing: str, *env_ids: str) -> list[str]:
        output.write_text("")
        process = forked.start(make_without, missing.split(","), env_ids, output=output)
        process.join(120)
        return output.read_text().splitlines()

    extra = "3 pip install 'unirl[multiagent]'"
    assert said("pettingzoo", "pettingzoo/classic/rps_v2") == ["True True", extra]
    if importlib.util.find_spec("pettingzoo"):
        lacking = said("pygame,multi_agent_ale_py", *(f"pettingzoo/{name}" for name in (
            "classic/rps_v2", "atari/pong_v3"
        )))  # fmt: skip
        expected = [f"3 pip install 'pettingzoo[{family}]'" for family in ("classic", "atari")]
        assert lacking == ["True True", *expected]


# -- PettingZoo itself -----------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("game", [Duel, CountingAgents])
def test_the_toys_follow_pettingzoos_interface(game: Any) -> None:
    from pettingzoo import ParallelEnv
    from pettingzoo.test import parallel_api_test

    made = type(game.__name__, (game, ParallelEnv), {})()
    # Its check knows no agent that is absent in one episode and there in another.
    if game is CountingAgents:
        made = type("Dying", (game, ParallelEnv), {})(lifetimes=[[2, 4, -3], [1, 1, -1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(made, num_cycles=50)


@needs_package
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rock_paper_scissors_is_played() -> None:
    pytest.importorskip("pygame", reason="the games of PettingZoo need pygame")
    config = EnvConfig("pettingzoo/classic/rps_v2", kwargs={"max_cycles": 3})
    env = make_vec(config, 4)
    assert env.agents == ("player_0", "player_1")  # type: ignore[attr-defined]
    assert env.reset(0).tolist() == [3, 3, 3, 3]
    rock_and_paper = np.array([0, 1, 2, 2])
    step = env.step(rock_and_paper)
    assert step.reward.tolist() == [-1, 1, 0, 0]
    assert step.obs.tolist() == [1, 0, 2, 2], "each sees what the other did"
    over = []
    for _ in range(6):
        step = env.step(rock_and_paper)
        assert step.mask.all() or not step.mask.any()
        over.append("filler" if not step.mask.any() else bool(step.truncated.all()))
    assert over == [False, True, "filler", False, False, True]
    env.close()


@needs_package
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_agents_of_a_real_game_die_one_by_one() -> None:
    pytest.importorskip("pygame", reason="the games of PettingZoo need pygame")
    config = EnvConfig("pettingzoo/butterfly/knights_archers_zombies_v11")
    env = make_vec(config, 8)
    random = np.random.default_rng(0)
    assert np.isfinite(env.reset(1)).all()
    was_done, was_acting, apart = np.zeros(8, bool), np.ones(8, bool), 0
    for _ in range(900):
        step = env.step(random.integers(0, 6, 8))
        assert np.isfinite(step.obs).all() and step.obs.dtype == np.float32
        assert not (was_done & step.mask).any(), "after an end comes a filler"
        assert not step.reward[~step.mask].any()
        games = step.mask.reshape(2, 4)
        apart += int((games.any(1) & ~games.all(1)).sum())
        joined = step.mask & ~was_acting
        assert (joined.reshape(2, 4).all(1) == joined.reshape(2, 4).any(1)).all()
        was_acting, was_done = step.mask, step.terminated | step.truncated
    assert apart > 10, "some were dead while others played on"
    env.close()


# -- what is learned from such rows ----------------------------------------------------------------


def test_the_learner_reads_off_the_slot_the_state_that_the_actor_had() -> None:
    # Of a policy with memory, fillers between two episodes may be many, and absent agents' rows are
    # nothing but fillers.
    config = PolicyConfig(hidden=(8,), core="lstm", core_size=8)
    policy = Policy(*spaces(COUNTING), config, seed=1)
    store, shape = LocalWeightStore(), ActorConfig(1, 6, 7)
    store.publish(policy.weights(), 0)
    actor = make_vector_actor(
        ActorContext(0, 0, store), env=COUNTING, policy=config, actor=shape, gamma=0.9
    )
    slot = Slot(0, 0, unroll_spec(*spaces(COUNTING), shape, policy.initial_state(1)).allocate())
    for _ in range(5):
        actor.produce(slot)
        data = slot.data
        reset = torch.cat((torch.zeros(1, 6, dtype=torch.bool), ~data["mask"]))
        unroll = policy.unroll(data["obs"], data["state"], reset)
        new_logp = unroll.distribution[:-1].log_prob(data["action"])
        torch.testing.assert_close(
            new_logp[data["mask"]], data["logp"][data["mask"]], atol=1e-5, rtol=1e-5
        )
        done = data["terminated"] | data["truncated"]
        assert (data["episode_length"][done] > 0).all()
        assert not data["episode_return"][~data["mask"]].any()
    # Sums of 1, 2, .. up to each lifetime.
    returns = {float(value) for value in data["episode_return"][done]}
    assert returns <= {1.0, 3.0, 6.0, 10.0}
    actor.close()


@pytest.mark.parametrize("core", ["none", "gru"])
def test_samples_through_environment_workers_are_those_of_one_process(core: Any) -> None:
    from tests.actors import test_inference as inference

    policy = PolicyConfig(hidden=(8,), core=core, core_size=8)
    sampler = replace(inference.SMALL, num_envs=6, batch_rows=6)
    made = inference.setting(replace(COUNTING, kwargs={"stagger": True}), policy, sampler)
    with inference.workers(made, QueueConfig(batch_size=4, max_staleness=0)) as queue:
        found = inference.taken(queue, 4)
    assert len(found) == 16 and set(found) <= set(islice(inference.inline(made), 40))


def best_actions(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every observation of Duel in which the player is not yet at the coin, and what to do."""
    obs, best = [], []
    for coin in range(length):
        for own in set(range(length)) - {coin}:
            for other in set(range(length)) - {coin}:
                obs.append([(coin - own) / length, (coin - other) / length])
                best.append(2 if coin > own else 0)
    return torch.tensor(obs), torch.tensor(best)


def test_a_policy_that_plays_all_agents_learns_the_dominant_action(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "env.id": DUEL.id,
        "actor.num_envs": 32,
        "actor.unroll_length": 16,
        "policy.hidden": (32,),
        "learner.gamma": 0.95,
        "learner.optimizer.lr": 5e-3,
        "runner.kind": "inline",
        "run.total_steps": 40_000,
    }
    plan = unirl.make_plan("impala", **settings)
    result = unirl.run(plan, tmp_path / "run", console=False)
    losses = {name: x for name, x in result.scalars.items() if name.startswith("losses/")}
    assert losses and all(math.isfinite(value) for value in losses.values()), losses
    assert abs(result.scalars["charts/episodic_return"]) < 1e-6, "what one wins the other loses"
    assert result.checkpoint is not None
    weights = flatten(load_checkpoint(result.checkpoint).model)
    policy = Policy(*spaces(DUEL), PolicyConfig(hidden=(32,)), seed=0)
    obs, best = best_actions(7)
    policy.load_weights(weights)
    agreement = (policy.act(obs, {}, deterministic=True).action == best).float().mean()
    assert agreement > 0.95
    evaluator = make_evaluator(DUEL, PolicyConfig(hidden=(32,)), 3)
    played = evaluator.evaluate(weights, 40, deterministic=True)
    assert len(played.returns) == 40 and sum(played.returns) == 0.0
    assert max(played.lengths) <= 6, "straight to the coin"


def test_an_evaluation_counts_the_episodes_of_each_agent() -> None:
    # Sums of 1, 2, .. up to each lifetime: 3 and 10 and 6 in the first episode, 1 and 3 in the
    # second, in which agent 1 is absent, and so on.
    policy = PolicyConfig(hidden=(8,))
    weights = Policy(*spaces(COUNTING), policy, seed=0).weights()
    evaluator = make_evaluator(COUNTING, policy, 1, num_envs=3)
    result = evaluator.evaluate(weights, 6)
    expected = [(1.0, 1), (3.0, 2), (3.0, 2), (6.0, 3), (10.0, 4), (10.0, 4)]
    assert sorted(zip(result.returns, result.lengths, strict=True)) == expected
