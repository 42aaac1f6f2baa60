"""Worlds that need no package of their own: a user's environment, simulators, failures by name."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unirl.errors import UniRLError
from unirl.llm.agents.tool_calls import ToolCall
from unirl.llm.agents.worlds.make import make_world
from unirl.llm.agents.worlds.world import EnvClient, Observation, WorldFailed, shortened

OWN = "text:own_worlds:"


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def played(
    spec: str, *actions: str | ToolCall, seconds: float = 5.0, task: Any = None, **options: str
) -> list[Observation]:
    async def play() -> list[Observation]:
        client: EnvClient = make_world(spec, options, seconds=seconds)()
        try:
            seen = [await client.reset(task or {}, 3)]
            return seen + [await client.step(action) for action in actions]
        finally:
            await client.close()
            await client.close()

    return asyncio.run(play())


def said(observation: Observation) -> str:
    (message,) = observation.messages
    return str(message["content"])


def test_an_own_environment_answers_text_until_it_ends() -> None:
    first, *rest = played(OWN + "Guess", *map(str, range(1, 10)))
    assert said(first) == "Guess my number from 1 to 9." and first.reward is None
    assert [each.terminated for each in rest].count(True) == 1
    assert all(each.terminated == (each.reward == 1.0) == (said(each) == "Right.") for each in rest)
    assert [each.reward for each in played(OWN + "Guess", *map(str, range(1, 10)))[1:]] == [
        each.reward for each in rest
    ]


def test_an_own_environment_may_be_async_and_have_tools() -> None:
    call = ToolCall("c1", "guess", {"number": 4})
    first, text, called = played(OWN + "AsyncGuess", "hm", call, task={"answer": "7"})
    assert first.messages == ({"role": "system", "content": "7"},)
    assert first.tools is not None and first.tools[0]["function"]["name"] == "guess"
    assert (text.terminated, text.truncated, text.reward) == (False, True, None)
    assert called.reward == 2.0 and called.terminated
    assert called.messages[0]["tool_call_id"] == "c1" and said(called) == "guess 4"


def test_a_call_where_nothing_can_be_called_is_the_policys_mistake() -> None:
    (_, seen) = played(OWN + "Guess", ToolCall("c", "look", {}))
    assert seen.is_invalid and "nothing can be called" in said(seen) and seen.reward is None


@pytest.mark.parametrize(
    ("action", "kind", "why"),
    [
        ("raise", "code", "own_worlds.py:22: out of order"),
        ("exit", "code", "SystemExit: 3"),
        ("hang", "hung", "longer than 0.3 s"),
    ],
)
def test_an_environment_that_fails_is_named_within_its_deadline(
    action: str, kind: str, why: str
) -> None:
    started = time.monotonic()
    with pytest.raises(WorldFailed, match=f"{OWN}Guess failed at step 1") as failed:
        played(OWN + "Guess", action, seconds=0.3)
    assert failed.value.kind == kind and why in str(failed.value)
    assert time.monotonic() - started < 8  # closing one that hangs has a deadline too


def test_an_environment_that_returns_nonsense_is_named() -> None:
    with pytest.raises(WorldFailed, match=r"step must return .text, reward, done.") as failed:
        played(OWN + "Nonsense", "x")
    assert "own_worlds.py" in str(failed.value)


@pytest.mark.parametrize(
    ("spec", "options", "part"),
    [
        ("texts:a:B", {}, 'did you mean "text"'),
        ("text", {}, "a world is written"),
        (OWN + "Gues", {}, 'did you mean "Guess"'),
        (OWN + "weather", {}, "no reset and no step"),
        (OWN + "Guess", {"least": "1"}, "unexpected keyword argument 'least'"),
        ("gym:CartPol-v1", {}, "gymnasium.make"),
        ("gym:CartPole-v1", {"act": "words"}, "text or tool"),
        ("gym:CartPole-v1", {"actions": "left"}, "the environment has 2"),
        ("openenv:127.0.0.1", {}, "no address"),
        ("openenv:ws://127.0.0.1:9", {}, "cannot be reached"),
        ("nemo:http://127.0.0.1:9", {}, "cannot be reached"),
        ("nemo:http://127.0.0.1:9", {"x": "y"}, "has no option"),
        ("skyrl:gsm8k", {"python": sys.executable}, "ModuleNotFoundError"),
        ("skyrl:gsm8k", {"python": "no-such-python"}, "which is no program"),
    ],
)
def test_a_world_that_cannot_be_is_refused_at_the_start(
    spec: str, options: dict[str, str], part: str
) -> None:
    with pytest.raises(UniRLError) as error:
        make_world(spec, options)
    assert part in str(error.value) and len(error.value.parts) == 3


def test_a_simulator_speaks_with_the_names_of_its_documentation() -> None:
    world = make_world("gym:CartPole-v1", {})
    tasks = world.tasks("train")
    assert tasks is not None and len(tasks) == 1000 and not world.tools
    assert "1: Push cart to the right" in tasks[0].messages[0]["content"]
    first, right, name, wrong = played(
        "gym:CartPole-v1", "1", "Action: push cart to the LEFT", "up"
    )
    assert "Pole Angle: " in said(first)
    assert right.reward == name.reward == 1.0 and said(wrong) != said(name)
    assert wrong.is_invalid and wrong.reward is None and "Nothing has happened" in said(wrong)


def test_ends_of_a_simulator_are_kept_apart() -> None:
    # A pole that is pushed to one side alone has fallen after 8 to 10 steps.
    fallen = played("gym:CartPole-v1", *["1"] * 8)
    ends = [each.terminated for each in played("gym:CartPole-v1", *["1"] * 10)]
    assert not fallen[-2].has_ended and any(ends)
    assert not any(each.truncated for each in fallen)
    lake = played("gym:FrozenLake-v1", *["0"] * 100, is_slippery="false")
    assert lake[-1].truncated and not lake[-1].terminated and not lake[-2].has_ended


def test_a_start_is_a_function_of_its_seed_and_held_out_ones_are_others() -> None:
    world = make_world("gym:Taxi-v4", {"tasks": "20"})
    train, held_out = world.tasks("train"), world.tasks("held_out")
    assert train is not None and held_out is not None
    seeds = [
        {each.info["seed"] for each in map(some.__getitem__, range(len(some)))}
        for some in (train, held_out)
    ]
    assert len(seeds[0]) == 20 and not seeds[0] & seeds[1]
    first, again, other = (
        said(played("gym:Taxi-v4", task={"info": {"seed": seed}})[0]) for seed in (1, 1, 5)
    )
    assert first == again != other
    assert "(" in first and "[" in first and "*" in first


def test_a_simulator_is_acted_on_by_calls_or_lists_of_numbers() -> None:
    (tool,) = make_world("gym:FrozenLake-v1", {"act": "tool"}).tools
    assert tool["function"]["parameters"]["properties"]["action"]["enum"][2] == "Move right"
    _, seen = played("gym:FrozenLake-v1", ToolCall("a", "act", {"action": "Move up"}))
    assert seen.messages[0]["tool_call_id"] == "a" and not seen.is_invalid
    _, good, bad = played("gym:Pendulum-v1", "I push.\n[0.5]", "[NaN]")
    assert good.reward is not None and bad.is_invalid


def test_long_texts_lose_their_middle() -> None:
    text = shortened("a" * 500 + "b" * 500, 100)
    assert len(text) <= 100 and text[0] == "a" and text[-1] == "b" and "900" in text
    assert shortened("short", 100) == "short"
