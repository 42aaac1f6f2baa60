"""Tools: schemas from signatures, calls that go wrong, state of an episode, servers of MCP."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from unirl.errors import UniRLError
from unirl.llm.agents.tool_calls import ToolCall
from unirl.llm.agents.tools.make import make_tools
from unirl.llm.agents.tools.mcp import McpSession, _StdioLink
from unirl.llm.agents.tools.schema import complaint
from unirl.llm.agents.tools.tool import ToolResult
from unirl.llm.agents.worlds.world import WorldFailed
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.make import make_task

SMALL_SERVER = """
import json, sys
total = 0
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
    elif message["method"] == "tools/list" and not message["params"].get("cursor"):
        schema = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
        result = {"tools": [{"name": "count", "inputSchema": schema}], "nextCursor": "2"}
    elif message["method"] == "tools/list":
        result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in
                            ("die", "babble", "refuse", "hang")]}
    elif message["params"]["name"] == "count":
        total += message["params"]["arguments"]["by"]
        result = {"content": [{"type": "text", "text": str(total)}, {"type": "image"}]}
    elif message["params"]["name"] == "die":
        sys.exit(1)
    elif message["params"]["name"] == "babble":
        print("no json", flush=True)
        continue
    elif message["params"]["name"] == "hang":
        continue
    else:
        error = {"code": -32602, "message": "not so"}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def server(tmp_path: Path) -> str:
    path = tmp_path / "server.py"
    path.write_text(SMALL_SERVER)
    return f"mcp:{shlex.quote(sys.executable)} {shlex.quote(str(path))}"


def called(
    names: list[str],
    *calls: tuple[str, Mapping[str, Any]],
    seconds: float = 5.0,
    at_once: bool = False,
) -> list[ToolResult]:
    async def call() -> list[ToolResult]:
        tools = make_tools(names, {}, seconds=seconds, max_chars=200)
        box = await tools.open({"answer": "42"})
        asked = [ToolCall(str(i), name, dict(given)) for i, (name, given) in enumerate(calls)]
        try:
            if at_once:
                return await box.call_all(asked)
            return [await box.call(each) for each in asked]
        finally:
            await box.close()
            await tools.close()

    return asyncio.run(call())


def test_a_schema_is_read_from_signature_and_docstring() -> None:
    (schema,) = make_tools(["own_worlds:weather"], {}, seconds=1, max_chars=100).schemas
    assert schema["function"] == {
        "name": "weather",
        "description": "Say the weather.\n\nIt is always the same.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "where"},
                "days": {"type": "integer", "description": "How many of them.", "default": 1},
                "unit": {"enum": ["C", "F"], "default": "C"},
                "deep": {"type": "boolean", "default": False},
            },
            "required": ["town"],
            "additionalProperties": False,
        },
    }


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({}, "Error: the call lacks town."),
        ({"town": 3}, "Error: town must be of type string, not 3."),
        ({"town": "Rome", "days": True}, "Error: days must be of type integer, not true."),
        ({"town": "Rome", "unit": "K"}, 'Error: unit must be one of ["C", "F"], not "K".'),
        ({"town": "Rome", "when": 1}, "Error: the call has no argument when; there are: town"),
    ],
)
def test_wrong_arguments_are_an_answer_for_the_model(
    arguments: dict[str, Any], answer: str
) -> None:
    (result,) = called(["own_worlds:weather"], ("weather", arguments))
    assert result.text.startswith(answer) and result.ended == "arguments"


def test_what_goes_wrong_in_a_call_is_text_and_bounded() -> None:
    names = [f"own_worlds:{name}" for name in ("weather", "fails", "hangs", "shout")]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("weather", {"town": "Rome"}),
        ("fails", {"what": "no rain"}),
        ("hangs", {}),
        ("shout", {"text": "ho"}),
        ("wether", {}),
    ]
    results = called(names, *calls, seconds=0.3)
    assert [each.ended for each in results] == ["ok", "error", "time_out", "ok", "unknown"]
    texts = [each.text for each in results]
    assert texts[0] == '{"town": "Rome", "days": 1, "unit": "C"}'
    assert texts[1] == "Error: RuntimeError: no rain"
    assert "longer than 0.3 s" in texts[2] and len(texts[3]) <= 200
    assert 'did you mean "weather"' in texts[4]
    assert results[0].message["tool_call_id"] == "0"


def test_calls_run_at_the_same_time() -> None:
    started = time.monotonic()
    results = called(["own_worlds:hangs"], *[("hangs", {})] * 5, seconds=0.5, at_once=True)
    assert {each.ended for each in results} == {"time_out"}
    assert time.monotonic() - started < 2


def test_a_class_is_made_for_each_episode() -> None:
    for _ in range(2):
        add, show = called(["own_worlds:Shop"], ("add", {"thing": "tea"}), ("show", {}))
        assert add.text == "2" and show.text == '["42", "tea"]'


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["own_worlds:untyped"], "parameter a of"),
        (["own_worlds:odd"], "has the type complex"),
        (["own_worlds:Guess"], "parameter task"),
        (["own_worlds:nothing"], "has no attribute"),
        (["calculator", "calculator"], "two tools are named calculator"),
        (["calculater"], "there are calculator, search"),
        (["mcp:"], "names no server"),
        (["mcp:false"], "does not name its tools"),
        (["mcp:http://127.0.0.1:9/mcp"], "does not name its tools"),
    ],
)
def test_a_tool_that_cannot_be_is_refused_at_the_start(names: list[str], part: str) -> None:
    with pytest.raises(UniRLError) as error:
        make_tools(names, {}, seconds=1, max_chars=100)
    assert part in str(error.value) and len(error.value.parts) == 3


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 * (3 + 4)", "14"),
        ("7 / 2", "3.5"),
        ("sqrt(16) - -1", "5"),
        ("2**200 % 10**6", str(2**200 % 10**6)),
        ("1/0", "Error: it has no result: division by zero."),
        ("9**9**9", "Error: it has no result: the result is too large."),
        ("round(1, -99999999)", "Error: it has no result: the result is too large."),
        ("round(2.345, 1) + round(7 / 2)", "6.3"),
        ("__import__('os')", "Error: it may hold numbers"),
        ("(" * 300, "Error: "),
    ],
)
def test_a_calculator_reads_arithmetic_alone(expression: str, result: str) -> None:
    (seen,) = called(["calculator"], ("calculator", {"expression": expression}))
    assert seen.text.startswith(result)


def test_a_question_about_people_is_answered_by_two_searches() -> None:
    examples = make_task("people", TaskConfig(name="people")).held_out
    for i in range(20):
        question = examples[i].messages[0]["content"]
        pupil = question.removeprefix("Where was the teacher of ").removesuffix(" born?")
        found, nothing = called(
            ["search"], ("search", {"query": f"{pupil} pupil of"}), ("search", {"query": "*("})
        )
        lines = [each.partition(". ")[2] for each in found.text.splitlines()]
        (fact,) = [each for each in lines if each.startswith(f"{pupil} was a pupil of ")]
        assert nothing.ended == "error"
        teacher = fact.partition(" pupil of ")[2].removesuffix(".")
        (born,) = called(["search"], ("search", {"query": f"{teacher} born"}))
        assert f"{teacher} was born in {examples[i].answer}." in born.text


def test_tools_of_an_mcp_server_remember_one_episode(server: str) -> None:
    count = ("count", {"by": 2})
    for _ in range(2):
        results = called([server], count, count, ("count", {}), ("refuse", {}))
        assert [each.text for each in results[:2]] == ["2\n[image]", "4\n[image]"]
        assert results[2].ended == "arguments"
        assert (results[3].text, results[3].ended) == ("Error: not so", "error")


def test_an_mcp_server_that_is_silent_costs_one_call(server: str) -> None:
    results = called([server], ("count", {"by": 1}), ("hang", {}), ("count", {"by": 1}), seconds=2)
    assert [each.ended for each in results] == ["ok", "time_out", "ok"]


@pytest.mark.parametrize("name", ["die", "babble"])
def test_an_mcp_server_that_fails_is_infrastructure(server: str, name: str) -> None:
    with pytest.raises(WorldFailed, match="the MCP server"):
        called([server], (name, {}))


def test_a_number_beyond_floats_is_compared() -> None:
    assert "maximum" in complaint(10**400, {"type": "integer", "maximum": 9})
    assert complaint(10**400, {"type": "integer", "minimum": 9}) == ""


def test_a_server_of_tools_that_cannot_start_is_infrastructure(tmp_path: Path) -> None:
    session = McpSession("none", _StdioLink(str(tmp_path / "none")))
    with pytest.raises(WorldFailed, match="cannot start"):
        asyncio.run(session.start())
