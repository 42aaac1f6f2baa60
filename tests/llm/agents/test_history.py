"""Hashes of conversations: what is remembered changes no hash, and saves the hashing."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl.llm.agents.history as history
from unirl.llm.agents.history import Histories

PART = {"type": "text", "text": "x"}
VALUES: list[Any] = [
    "",
    "x",
    "y",
    1,
    True,
    1.0,
    None,
    [PART],
    [PART | {"n": 1}],
    [PART | {"n": True}],
]


def message(chance: random.Random) -> dict[str, Any]:
    role = chance.choice(["user", "assistant", "tool"])
    found: dict[str, Any] = {"role": role, "content": chance.choice(VALUES)}
    if role == "assistant" and chance.random() < 0.5:
        arguments = chance.choice(['{"a": 1}', '{"a": true}', {"a": 1}, {"a": True}, {"b": [1.0]}])
        found["tool_calls"] = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    return found


def test_what_is_remembered_changes_no_hash() -> None:
    chance = random.Random(0)
    one = Histories()
    said: list[dict[str, Any]] = []
    tools: list[Any] = []
    for _ in range(2000):
        what = chance.random()
        if what < 0.4 or not said:
            said.append(message(chance))
        elif what < 0.6:
            said[chance.randrange(len(said))]["content"] = chance.choice(VALUES)  # in place
        elif what < 0.7:
            del said[chance.randrange(len(said)) :]
        elif what < 0.8:
            said = copy.deepcopy(said)
            said[chance.randrange(len(said))] = message(chance)
        elif what < 0.85:
            tools = chance.choice([[], [{"name": "f", "d": 1}], [{"name": "f", "d": True}]])
        assert one.chain(said, tools) == Histories().chain(said, tools)


def test_a_message_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0
    whole = history.canonical

    def count(message: Any) -> Any:
        nonlocal counted
        counted += 1
        return whole(message)

    monkeypatch.setattr(history, "canonical", count)
    one = Histories()
    said: list[Any] = []
    for number in range(100):
        said.append({"role": "user", "content": f"{number}"})
        one.chain(copy.deepcopy(said), [])
    assert counted == 100
