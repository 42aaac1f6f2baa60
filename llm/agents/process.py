"""Step rewards of tasks with one call, judged when an episode has ended: see AgentConfig's
process_reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import eq
from typing import Any

from unirl.llm.agents.tool_calls import calls_of
from unirl.llm.rewards.rules import exact

_END = "\0"


def call_and_answer(
    turns: Sequence[Mapping[str, Any]], answer: str, info: Mapping[str, Any]
) -> list[list[float]]:
    """For each token of each turn the share of its characters that are in their places, the end
    being one. The first turn is compared with `info["call"]`, the others with what the tool
    returned, right or not, so that both are learned at a time. A turn behind a failed call earns 0.
    `answer` is not read: the outcome is judged by it.
    """
    wanted = [str(info.get("call", "")), *(_given(turn) for turn in turns[1:])]
    answered = [True, *map(_was_answered, turns)]
    return [
        _in_place(turn, text) if paid else [0.0] * len(turn["tokens"])
        for turn, text, paid in zip(turns, wanted, answered, strict=False)
    ]


def tool_and_answer(
    turns: Sequence[Mapping[str, Any]], answer: str, info: Mapping[str, Any]
) -> list[float]:
    """As call_and_answer, for models that write calls as JSON: a call in the first turn is worth a
    half, and 1 if its one argument is what `info["call"]` has behind "="; a later turn is worth 1
    if it is the answer.
    """
    wanted = str(info.get("call", "")).removeprefix("=")
    found = [exact(str(turn["answer"].get("content") or ""), answer) for turn in turns]
    if turns and (calls := calls_of(turns[0]["answer"])):
        arguments = [str(each).replace(" ", "") for one in calls for each in one.arguments.values()]
        found[0] = 1.0 if arguments == [wanted] else 0.5
    return found


def _in_place(turn: Mapping[str, Any], wanted: str) -> list[float]:
    """With the end as a character: without it, to end early costs no more than a wrong guess, and
    is what a model settles on before it has found the last character.
    """
    wanted, place, shares = wanted + _END, 0, []
    for number, token in enumerate(turn["tokens"], 1):
        is_end = number == len(turn["tokens"]) and turn["finish"] == "stop"
        text = _END if is_end and not token else token
        behind = wanted[place : place + len(text)]
        shares.append(sum(map(eq, text, behind)) / max(1, len(text)))
        place += len(text)
    return shares


def _given(turn: Mapping[str, Any]) -> str:
    """The last that the model was given before it drew the turn."""
    return str(turn["messages"][-1].get("content") or "")


def _was_answered(turn: Mapping[str, Any]) -> bool:
    """Whether it called, and every call succeeded."""
    return turn["info"].get("calls", 0) > 0 and not turn["info"].get("failed_calls")
