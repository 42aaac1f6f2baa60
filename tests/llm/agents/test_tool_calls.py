"""Calls of tools out of text, and what makes two of them the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.llm.agents.tool_calls import ToolCall, as_openai, calls_of, canonical, parse_answer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}]
ADD = '{"name": "add", "arguments": {"a": 1}}'


def test_calls_in_parallel_are_found_with_the_text_around_them() -> None:
    text = f'Both.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{{"name": "b"}}</tool_call>'
    found = parse_answer(text, TOOLS)
    assert found.calls == (ToolCall("call_0", "add", {"a": 1}), ToolCall("call_1", "b", {}))
    assert (found.content, found.errors) == ("Both.", ())


@pytest.mark.parametrize(
    ("text", "calls", "says"),
    [
        (f"<tool_call>{ADD}", 1, ""),
        (f"<tool_call>{ADD}\n<tool_call>{ADD}</tool_call>", 2, ""),
        ('<tool_call>{"name": "add", </tool_call>', 0, "no JSON"),
        ('<tool_call>{"name": "add", "argum', 0, "not closed"),
        ("<tool_call>[1]</tool_call>", 0, "it must be"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', 0, "must be an object"),
        (f"<tool_call>nonsense</tool_call><tool_call>{ADD}</tool_call>", 1, "no JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", 0, "no JSON"),
    ],
)
def test_broken_calls_are_explained_and_whole_ones_kept(text: str, calls: int, says: str) -> None:
    found = parse_answer(text, TOOLS)
    assert len(found.calls) == calls
    assert len(found.errors) == bool(says)
    assert all(says in error and len(error) < 600 for error in found.errors)
    assert ("<tool_call>" in found.content) == bool(says)


def test_a_closing_mark_within_a_string_closes_nothing() -> None:
    text = '<tool_call>{"name": "say", "arguments": {"x": "a </tool_call> b"}}</tool_call> end'
    found = parse_answer(text, TOOLS)
    assert found.calls[0].arguments == {"x": "a </tool_call> b"}
    assert found.content == "end"


def test_thoughts_are_apart_also_where_the_template_opened_them() -> None:
    for text in ("<think>\nhm\n</think>\n\n4", "hm\n</think>\n\n4"):
        assert parse_answer(text, ()) == ("4", (), (), "hm")
    assert parse_answer("<think>hm", ()) == ("", (), (), "hm")


def test_a_brief_call_is_a_line_that_begins_with_an_equals_sign() -> None:
    found = parse_answer("=12+30\nrest", TOOLS, style="brief")
    assert found.calls == (ToolCall("call_0", "add", {"a": "12+30"}),)
    assert parse_answer("12=3", TOOLS, style="brief").calls == ()


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=3))
def test_a_call_written_by_a_client_is_read_again(arguments: dict[str, Any]) -> None:
    call = ToolCall("c", "f", arguments)
    message = {"role": "assistant", "content": None, "tool_calls": [as_openai(call)]}
    assert calls_of(message) == [call]
    rewritten = {"id": "other", "function": {"name": "f", "arguments": arguments}}
    again = {"role": "assistant", "content": [], "tool_calls": [rewritten], "reasoning": "x"}
    assert canonical(message) == canonical(again)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='<>{}"tool_call/:\\[], a') | st.text())
def test_any_text_is_parsed(text: str) -> None:
    found = parse_answer(f"<tool_call>{text}", TOOLS)
    assert len(found.calls) + len(found.errors) >= 1
