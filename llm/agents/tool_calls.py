"""Calls of tools: read out of what a model said, and compared by their values, as clients write
their JSON each in its own way.

Source: the format of Hermes and Qwen, <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unirl.llm.tasks.task import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT_OPEN, _THOUGHT_CLOSE = "<think>", "</think>"
MARKS = (OPEN, CLOSE, _THOUGHT_OPEN, _THOUGHT_CLOSE)
"""Parts of an answer that some tokenizers have special tokens for."""
_SHOWN = 200
"""Characters of a broken call that the model is shown again."""


class ToolCall(NamedTuple):
    """What the model wants done."""

    id: str
    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """An answer taken apart."""

    content: str
    """What is no call; broken calls stay in it."""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    """Of each call that nothing can be made of: a sentence for the model."""
    thought: str = ""
    """What it thought before it answered."""


def parse_answer(
    text: str,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Any = None,  # of transformers
    *,
    style: str = "hermes",
    prefix: str = "call_",
) -> Parsed:
    """prefix: of the calls' ids. Without tools everything is content, but thoughts. Where nothing
    is found in `style`, a tokenizer that can parse its model's answers is asked.
    """
    thought, text = _thought(text)
    if not tools:
        return Parsed(text, thought=thought)
    found = _brief(text, tools, prefix) if style == "brief" else _hermes(text, prefix)
    if not found.calls and not found.errors and getattr(tokenizer, "response_template", None):
        found = _by_tokenizer(text, tools, tokenizer, prefix) or found
    return found._replace(thought=thought)


def canonical(message: Message) -> Any:
    """What two tellings of the same message have in common: role, text, and calls by name and
    parsed arguments. Thoughts and ids are left out, as many clients drop or rename them.
    """
    role = message.get("role")
    said = content_text(message.get("content"))
    if role != "assistant":
        return [role, said]
    calls = [
        [name, arguments if isinstance(arguments, str) else sorted_json(arguments)]
        for name, arguments in map(_named, message.get("tool_calls") or ())
    ]
    return [role, said.strip(), *calls]


def sorted_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def content_text(content: Any) -> str:
    """Of a text, of a list of parts, or of nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(
            part if isinstance(part, str) else str(part.get("text") or "") for part in content
        )
    return str(content)


def as_openai(call: ToolCall) -> dict[str, Any]:
    """An entry of `tool_calls` in a message."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of an assistant's message; arguments that are no object are an empty one."""
    found = []
    for entry in message.get("tool_calls") or ():
        name, arguments = _named(entry)
        found.append(
            ToolCall(
                str(entry.get("id", "")), name, arguments if isinstance(arguments, dict) else {}
            )
        )
    return found


def _named(entry: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and parsed arguments; these as they are where they do not parse."""
    function = entry.get("function") or entry
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return str(function.get("name", "")), arguments


def _thought(text: str) -> tuple[str, str]:
    """A template may have opened the thought already. One that is not closed is all there is."""
    before, close, after = text.partition(_THOUGHT_CLOSE)
    if close:
        return before.replace(_THOUGHT_OPEN, "", 1).strip(), after.lstrip("\n")
    if text.lstrip().startswith(_THOUGHT_OPEN):
        return text.replace(_THOUGHT_OPEN, "", 1).strip(), ""
    return "", text


def _hermes(text: str, prefix: str) -> Parsed:
    kept: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    rest = text
    while True:
        before, begins, rest = rest.partition(OPEN)
        kept.append(before)
        if not begins:
            break
        # A close inside a string of the JSON is no close: take the first one that parses.
        body, closed, rest = _block(rest)
        call = _call(body, f"{prefix}{len(calls)}")
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            kept.append(OPEN + body + (CLOSE if closed else ""))
            why = call if closed or not body.strip() else f"{call}; it is not closed"
            errors.append(f"A call of a tool could not be read: {why}: {_short(body)}")
    content = "".join(kept)
    return Parsed(content.strip() if calls or errors else content, tuple(calls), tuple(errors))


def _block(rest: str) -> tuple[str, bool, str]:
    """The body of a call, whether it is closed, and what follows. An unclosed one ends where its
    JSON does, if it does.
    """
    end = rest.find(CLOSE)
    while end >= 0:
        body = rest[:end]
        if OPEN in body and not _parses(body):
            break
        after = rest.find(CLOSE, end + 1)
        if after < 0 or _parses(body) or OPEN in rest[end:after]:
            return body, True, rest[end + len(CLOSE) :]
        end = after
    another = rest.find(OPEN)
    body, rest = (rest, "") if another < 0 else (rest[:another], rest[another:])
    start = len(body) - len(body.lstrip())
    try:
        _, stop = json.JSONDecoder().raw_decode(body, start)
    except (ValueError, RecursionError):
        return body, False, rest
    return body[:stop], False, body[stop:] + rest


def _parses(body: str) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _call(body: str, id: str) -> ToolCall | str:
    """The call, or what is wrong with it."""
    try:
        value = json.loads(body)
        if isinstance(value, dict) and isinstance(value.get("arguments"), str):
            value["arguments"] = json.loads(value["arguments"])
        # What clients in other languages cannot read, and half of a character.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return f"it is no JSON ({error})"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'it must be {"name": ..., "arguments": {...}}'
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return f"its arguments must be an object, they are {_short(repr(arguments))}"
    return ToolCall(id, value["name"], arguments)


def _brief(text: str, tools: Sequence[Mapping[str, Any]], prefix: str) -> Parsed:
    if not text.startswith("="):
        return Parsed(text)
    line, _, rest = text[1:].partition("\n")
    name, schema = tool_name(tools[0]), tool_parameters(tools[0])
    keys = list(schema.get("properties") or {"input": {}})
    return Parsed(rest, (ToolCall(f"{prefix}0", name, {keys[0]: line.strip()}),))


def _by_tokenizer(
    text: str, tools: Sequence[Mapping[str, Any]], tokenizer: Any, prefix: str
) -> Parsed | None:
    try:
        message = tokenizer.parse_response(text, tools=list(tools))
    except Exception:  # a template is a program of the model's author
        return None
    calls = calls_of(message)
    if not calls:
        return None
    named = tuple(call._replace(id=f"{prefix}{i}") for i, call in enumerate(calls))
    return Parsed(content_text(message.get("content")), named)


def tool_name(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or tool).get("name", ""))


def tool_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (tool.get("function") or tool).get("parameters") or {}
    return found


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
