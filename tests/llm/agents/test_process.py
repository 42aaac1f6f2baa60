"""Step rewards of tasks with one call."""

from __future__ import annotations

from typing import Any

import pytest

from unirl.llm.agents.process import call_and_answer, tool_and_answer
from unirl.llm.agents.tool_calls import ToolCall, as_openai

INFO = {"call": "=12*30"}


def turn(
    text: str, *arguments: dict[str, Any], given: str = "", finish: str = "stop", failed: int = 0
) -> dict[str, Any]:
    calls = [as_openai(ToolCall(f"call_{i}", "calculator", a)) for i, a in enumerate(arguments)]
    said = {"role": "assistant", "content": text}
    return {
        "messages": [{"role": "tool", "content": given}],
        "tokens": [*text, *([""] if finish == "stop" else [])],
        "finish": finish,
        "answer": said | ({"tool_calls": calls} if calls else {}),
        "info": {"calls": len(calls), "invalid_calls": 0, "failed_calls": failed},
    }


def test_the_call_and_then_what_the_tool_said() -> None:
    wrong = turn("=12*31", {"expression": "12*31"})
    turns = [wrong, turn("372", given="372"), turn("37", given="372")]
    found = call_and_answer(turns, "360", INFO)
    assert found[0] == [1, 1, 1, 1, 1, 0, 1]
    assert found[1] == [1, 1, 1, 1]
    assert found[2] == [0.0] * 3  # nothing was called before the last
    turns[1] = turn("37", given="372")
    assert call_and_answer(turns[:2], "360", INFO)[1] == [1, 1, 0]
    assert call_and_answer([], "360", INFO) == []


def test_what_is_said_after_a_call_that_failed_is_worth_nothing() -> None:
    turns = [turn("=12*?", {"expression": "12*?"}, failed=1), turn("?", given="?")]
    assert call_and_answer(turns, "360", INFO)[1] == [0.0, 0.0]


def test_the_end_is_a_character_in_its_place() -> None:
    early, wrong, cut = turn("=12*3"), turn("=12*31"), turn("=12*30", finish="length")
    worth = [call_and_answer([each], "360", INFO)[0] for each in (early, wrong, cut)]
    assert worth[0] == [1, 1, 1, 1, 1, 0]
    assert worth[1] == [1, 1, 1, 1, 1, 0, 1]
    assert worth[2] == [1, 1, 1, 1, 1, 1]


def test_a_token_of_several_characters_is_worth_those_in_their_places() -> None:
    one = {**turn("=12*31"), "tokens": ["=12", "*31", ""]}
    assert call_and_answer([one], "360", INFO)[0] == [1.0, pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize(
    ("first", "worth"),
    [
        (turn("", {"expression": "12 * 30"}), 1.0),
        (turn("", {"expression": "12*31"}), 0.5),
        (turn("", {"expression": "12*30", "more": "1"}), 0.5),
        (turn("", {"expression": "12*30"}, {"expression": "12*30"}), 0.5),
        (turn("12*30"), 0.0),
        (turn("360"), 1.0),
    ],
)
def test_a_call_in_the_first_turn(first: dict[str, Any], worth: float) -> None:
    assert tool_and_answer([first, turn(" 360 ")], "360", INFO) == [worth, 1.0]


def test_to_call_again_is_worth_nothing() -> None:
    again = turn("", {"expression": "12*30"})
    assert tool_and_answer([again, again, turn("360")], "360", INFO) == [1.0, 0.0, 1.0]
    assert tool_and_answer([], "360", INFO) == []
