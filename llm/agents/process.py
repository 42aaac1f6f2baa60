"""Step rewards of tasks with one call, judged when an episode has ended: see AgentConfig's
process_reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unirl.llm.agents.tool_calls import calls_of
from unirl.llm.rewards.rules import characters, exact


def call_and_answer(
    turns: Sequence[Mapping[str, Any]], answer: str, info: Mapping[str, Any]
) -> list[float]:
    """Step rewards of a task with one call: how much of the first turn is `info["call"]`, and how
    much of those behind it is the answer, character by character.
    """
    said = [str(turn["drawn_text"]) for turn in turns]
    wanted = [str(info.get("call", "")), *[answer] * len(said)]
    return [characters(text, right) for text, right in zip(said, wanted, strict=False)]


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
