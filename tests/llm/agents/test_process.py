"""Step rewards of tasks with one call."""

from __future__ import annotations

from typing import Any

import pytest

from unirl.llm.agents.process import call_and_answer, tool_and_answer
from unirl.llm.agents.tool_calls import ToolCall, as_openai

INFO = {"call": "=12*30"}


def turn(text: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    calls = [as_openai(ToolCall(f"call_{i}", "calculator", a)) for i, a in enumerate(arguments)]
    answer = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    return {"drawn_text": text, "answer": answer}


def test_characters_of_the_call_and_then_of_the_answer() -> None:
    turns = [turn("=12*31"), turn("360"), turn("36")]
    assert call_and_answer(turns, "360", INFO) == [pytest.approx(5 / 6), 1.0, pytest.approx(2 / 3)]
    assert call_and_answer([], "360", INFO) == []


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
