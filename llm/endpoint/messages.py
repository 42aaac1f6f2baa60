"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from unirl.llm.agents.tool_calls import calls_of
from unirl.llm.endpoint import dialect
from unirl.llm.endpoint.dialect import Asked, BadRequest, Event, Found

END = ""
_ROLES = ("user", "assistant", "system")
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_NO_EFFECT = ("top_k",)


def read(body: Mapping[str, Any]) -> Asked:
    messages: list[dict[str, Any]] = []
    system = dialect.text_of_parts(body.get("system"), "system", ("text",))
    if system:
        messages.append({"role": "system", "content": system})
    given = dialect.objects_of(body, "messages")
    if not given:
        raise BadRequest("messages must hold one message at least")
    for i, message in enumerate(given):
        messages += _messages(message, f"messages[{i}]")
    tools = [
        dialect.tool(
            entry.get("name"), entry.get("description"), entry.get("input_schema"), f"tools[{i}]"
        )
        for i, entry in enumerate(dialect.objects_of(body, "tools"))
    ]
    return Asked(
        messages=tuple(messages),
        tools=tuple(tools),
        stop=dialect.texts_of(body, "stop_sequences"),
        max_tokens=dialect.count_of(body, "max_tokens"),
        model=dialect.value_of(body, "model", str, "a text") or "policy",
        stream=dialect.value_of(body, "stream", bool, "true or false") or False,
        token_ids=bool(body.get("return_token_ids")),
        temperature=dialect.number_of(body, "temperature", 0.0, 100.0),
        top_p=dialect.number_of(body, "top_p", 0.0, 1.0),
        ignored=tuple(key for key in _NO_EFFECT if body.get(key)),
    )


def write(asked: Asked, found: Found) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "id": found.id,
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": _blocks(found),
        "stop_reason": _FINISH[found.answer.finish],
        "stop_sequence": None,
        "usage": {
            "input_tokens": found.num_given,
            "output_tokens": len(found.completion.tokens),
        },
    }
    if asked.token_ids:
        whole["prompt_token_ids"] = list(found.prompt)
        whole["token_ids"] = list(found.completion.tokens)
    return whole


def events(asked: Asked, found: Found) -> Iterator[Event]:
    for event in _events(asked, found):
        yield Event(event.name, {"type": event.name, **event.data})


def error(why: str, status: int, code: str | None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": why}}


def _events(asked: Asked, found: Found) -> Iterator[Event]:
    whole = write(asked, found)
    usage = {**whole["usage"], "output_tokens": 0}
    begun = {**whole, "content": [], "stop_reason": None, "usage": usage}
    yield Event("message_start", {"message": begun})
    for index, block in enumerate(whole["content"]):
        empty, deltas = _deltas(block)
        yield Event("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield Event("content_block_delta", {"index": index, "delta": delta})
        yield Event("content_block_stop", {"index": index})
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield Event("message_delta", {"delta": delta, "usage": whole["usage"]})
    yield Event("message_stop", {})


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """A block without what it holds, and this in pieces."""
    if block["type"] == "tool_use":
        text, key, kind = json.dumps(block["input"]), "partial_json", "input_json_delta"
        empty = {**block, "input": {}}
    else:
        key = "text" if block["type"] == "text" else "thinking"
        text, kind, empty = block[key], f"{key}_delta", {**block, key: ""}
    return empty, ({"type": kind, key: piece} for piece in dialect.pieces(text))


def _blocks(found: Found) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if found.thought:
        blocks.append({"type": "thinking", "thinking": found.thought, "signature": ""})
    if found.content or not found.calls:
        blocks.append({"type": "text", "text": found.content})
    for call in calls_of(found.answer.message):
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        )
    return blocks


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """What tools said are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise BadRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, it is {dialect.shown(role)}"
        )
    if not isinstance(content, list):
        text = dialect.text_of_parts(content, f"{where}.content", ("text",))
        return [{"role": role, "content": text}]
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type", "text") if isinstance(block, dict) else "text"
        if kind in ("thinking", "redacted_thinking"):
            continue
        if kind == "tool_result":
            said = dialect.text_of_parts(block.get("content"), f"{where}.tool_result", ("text",))
            id = str(block.get("tool_use_id") or "")
            found.append({"role": "tool", "content": said, "tool_call_id": id})
        elif kind == "tool_use":
            input = block.get("input")
            calls.append(dialect.call(block.get("id"), block.get("name"), input, where))
        else:
            texts.append(dialect.text_of_parts([block], f"{where}.content", ("text",)))
    if calls:
        own = {"role": role, "content": "".join(texts), "tool_calls": calls}
        return [*found, own]
    if texts or not found:
        found.append({"role": role, "content": "".join(texts)})
    return found
