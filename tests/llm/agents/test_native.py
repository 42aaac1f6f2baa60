"""The loop of the agent that is there without one: calls, what they say, and how episodes end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.agents.test_session import Script, session
from unirl.llm.agents.agent import AgentTask
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.episode import Episode
from unirl.llm.agents.make import make_agent

TASK = AgentTask("sums", ({"role": "user", "content": "12 and 30?"},), {}, 0, 7)


def call(expression: str, name: str = "calculator") -> str:
    body = f'{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def attempt(*texts: str, ends: bool = True, **settings: Any) -> tuple[str, Episode]:
    """How an episode ends in which the model says this, and the episode."""
    config = AgentConfig(tools=("calculator",), max_episode_tokens=100_000, **settings)

    async def run() -> tuple[str, Episode]:
        agent = make_agent(config, lambda: pytest.fail("no program drives it"))
        one = session(Script(*texts, ends=ends), config)
        try:
            return await agent.run(TASK, one), one.episode
        finally:
            await agent.close()

    return asyncio.run(run())


def given(episode: Episode, turn: int) -> list[str]:
    """What was said to the model before this turn."""
    return [str(message["content"]) for message in episode.turns[turn].messages]


def test_what_a_tool_says_is_given_to_the_model_and_an_answer_without_a_call_ends_it() -> None:
    ending, episode = attempt(call("12+30"), "it is 42.")
    assert ending == "stop" and len(episode.turns) == 2
    assert given(episode, 1) == ["42"]
    assert episode.turns[0].info["calls"] == 1 and episode.turns[0].info["failed_calls"] == 0


def test_calls_of_one_answer_are_answered_in_their_order() -> None:
    _, episode = attempt(call("1+1") + call("2+2"), "done")
    assert given(episode, 1) == ["2", "4"]


def test_a_call_that_cannot_be_read_is_answered_and_three_in_a_row_end_the_episode() -> None:
    ending, episode = attempt(*["<tool_call>{</tool_call>"] * 3)
    assert ending == "invalid" and len(episode.turns) == 3
    assert given(episode, 1)[0].startswith("Error: A call of a tool could not be read")
    ending, episode = attempt("<tool_call>{</tool_call>", call("1/0"), "nothing")
    assert ending == "stop"  # a call that fails was well formed
    assert given(episode, 2) == ["Error: it has no result: division by zero."]


def test_a_tool_that_there_is_not_is_answered_with_those_that_there_are() -> None:
    _, episode = attempt(call("1+1", name="calculate"), "oh")
    assert "no tool calculate; there are: calculator" in given(episode, 1)[0]


def test_a_brief_call_that_fails_is_answered_with_a_question_mark() -> None:
    ending, episode = attempt("=12+30", "=12++", "=)", "42", calls="brief")
    assert ending == "stop"
    assert [given(episode, turn) for turn in (1, 2, 3)] == [["42"], ["?"], ["?"]]
    assert [turn.info.get("failed_calls", 0) for turn in episode.turns] == [0, 1, 1, 0]
