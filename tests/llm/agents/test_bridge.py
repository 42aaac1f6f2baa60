"""How conversations with tools are written where a template has no place for tools."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

from unirl.llm.agents.bridge import Bridge
from unirl.llm.models.tiny import tiny_tokenizer
from unirl.llm.tasks.builtin import built_in_task
from unirl.llm.tasks.config import TaskConfig

TOOLS = ({"type": "function", "function": {"name": "calculator", "description": "adds up"}},)
TOKENIZER = tiny_tokenizer()
CONFIG = TaskConfig(name="products", options={"digits": "2", "shots": "1"})
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "40*89"}}\n</tool_call>'


def written(bridge: Bridge) -> str:
    example = built_in_task("products", CONFIG).train[0]
    return str(TOKENIZER.decode(bridge.whole(example.messages, TOOLS)))


def test_tools_are_described_in_front_and_calls_are_text() -> None:
    text = written(Bridge(TOKENIZER))
    assert text.startswith("<bos>you may call these tools:") and "adds up" in text
    assert f"40*89{CALL}<eos><tool_response>\n3560\n</tool_response>3560<eos>" in text


def test_a_model_that_is_given_no_schemas_still_reads_calls() -> None:
    bridge = Bridge(TOKENIZER, describes=False)
    text = written(bridge)
    assert text.startswith(f"<bos>40*89{CALL}<eos><tool_response>\n3560\n</tool_response>3560<eos>")
    # What follows a call that was drawn is written as in the prompt.
    end = TOKENIZER.eos_token_id
    behind = bridge.after([end], [{"role": "tool", "content": "3560"}], TOOLS)
    assert behind is not None
    assert TOKENIZER.decode(behind) == "<tool_response>\n3560\n</tool_response>>"


def test_brief_calls_are_left_as_they_are() -> None:
    text = written(Bridge(TOKENIZER, is_brief=True))
    assert text == "<bos>40*89<eos>35603560<eos>10*10>"
