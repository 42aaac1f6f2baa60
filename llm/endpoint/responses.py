"""OpenAI's responses. Nothing is stored between requests: a client sends its whole input each time,
as the Agents SDK does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unirl.llm.endpoint import dialect
from unirl.llm.endpoint.dialect import Asked, BadRequest, Event, Found

END = ""
error = dialect.openai_error
_ROLES = ("system", "developer", "user", "assistant")
_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def read(body: Mapping[str, Any]) -> Asked:
    for key in ("previous_response_id", "conversation"):
        if body.get(key):
            raise BadRequest(f"{key} is not supported: send the whole input each time")
    if body.get("background"):
        raise BadRequest("background is not supported: wait for the answer")
    messages: list[dict[str, Any]] = []
    instructions = dialect.value_of(body, "instructions", str, "a text")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = dialect.value_of(body, "input", (str, list), "a text or a list of items")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for i, item in enumerate(dialect.objects_of(body, "input")):
            _add(messages, item, f"input[{i}]")
    if not messages:
        raise BadRequest("input must hold one item at least")
    include = body.get("include")
    wants_logp = isinstance(include, list) and "message.output_text.logprobs" in include
    return Asked(
        messages=tuple(messages),
        tools=tuple(_tool(entry, i) for i, entry in enumerate(dialect.objects_of(body, "tools"))),
        stop=(),
        max_tokens=dialect.count_of(body, "max_output_tokens"),
        model=dialect.value_of(body, "model", str, "a text") or "policy",
        stream=dialect.value_of(body, "stream", bool, "true or false") or False,
        logprobs=wants_logp or bool(body.get("top_logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        temperature=dialect.number_of(body, "temperature", 0.0, 100.0),
        top_p=dialect.number_of(body, "top_p", 0.0, 1.0),
    )


def write(asked: Asked, found: Found) -> dict[str, Any]:
    whole = _response(asked, found, _output(asked, found))
    if asked.token_ids:
        whole["prompt_token_ids"] = list(found.prompt)
        whole["token_ids"] = list(found.completion.tokens)
    return whole


def events(asked: Asked, found: Found) -> Iterator[Event]:
    for number, event in enumerate(_events(asked, found)):
        yield Event(event.name, {"type": event.name, **event.data, "sequence_number": number})


def _events(asked: Asked, found: Found) -> Iterator[Event]:
    empty = {**_response(asked, found, []), "status": "in_progress", "usage": None}
    yield Event("response.created", {"response": empty})
    yield Event("response.in_progress", {"response": empty})
    for index, item in enumerate(_output(asked, found)):
        place = {"output_index": index, "item_id": item["id"]}
        begun = {**item, "status": "in_progress"}
        if item["type"] == "message":
            begun["content"] = []
        elif item["type"] == "function_call":
            begun["arguments"] = ""
        yield Event("response.output_item.added", {"output_index": index, "item": begun})
        if item["type"] == "message":
            yield from _text_events(item["content"][0], {**place, "content_index": 0})
        elif item["type"] == "function_call":
            for piece in dialect.pieces(item["arguments"]):
                yield Event("response.function_call_arguments.delta", {**place, "delta": piece})
            done = {**place, "name": item["name"], "arguments": item["arguments"]}
            yield Event("response.function_call_arguments.done", done)
        yield Event("response.output_item.done", {"output_index": index, "item": item})
    whole = write(asked, found)
    yield Event(f"response.{whole['status']}", {"response": whole})


def _text_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[Event]:
    empty = {**part, "text": "", "logprobs": []}
    yield Event("response.content_part.added", {**place, "part": empty})
    for piece in dialect.pieces(part["text"]):
        yield Event("response.output_text.delta", {**place, "delta": piece, "logprobs": []})
    done = {**place, "text": part["text"], "logprobs": part["logprobs"]}
    yield Event("response.output_text.done", done)
    yield Event("response.content_part.done", {**place, "part": part})


def _output(asked: Asked, found: Found) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    status = "incomplete" if _is_cut(asked, found) else "completed"
    if found.thought:
        content = [{"type": "reasoning_text", "text": found.thought}]
        item = {"id": f"rs_{found.id}", "type": "reasoning", "summary": [], "content": content}
        output.append(item)
    if found.content or not found.calls:
        part = {
            "type": "output_text",
            "text": found.content,
            "annotations": [],
            "logprobs": _logprobs(found) if asked.logprobs else [],
        }
        output.append(
            {
                "id": f"msg_{found.id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for call in found.calls:
        output.append(
            {
                "id": f"fc_{found.id}_{call['id']}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return output


def _response(asked: Asked, found: Found, output: list[dict[str, Any]]) -> dict[str, Any]:
    is_cut = _is_cut(asked, found)
    given, drawn = found.num_given, len(found.completion.tokens)
    return {
        "id": found.id,
        "object": "response",
        "created_at": found.created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "model": asked.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "max_output_tokens": asked.max_tokens,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + drawn,
        },
    }


def _is_cut(asked: Asked, found: Found) -> bool:
    """Clients take an incomplete response for a failure: one that set no limit cannot mean that."""
    return found.answer.finish == "length" and asked.max_tokens is not None


def _logprobs(found: Found) -> list[dict[str, Any]]:
    entries = []
    for token, logp in zip(found.completion.tokens, found.completion.logp, strict=True):
        text = found.text_of(token)
        entries.append(
            {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
        )
    return entries


def _tool(entry: Mapping[str, Any], index: int) -> dict[str, Any]:
    if entry.get("type") != "function":
        raise BadRequest(
            f"tools[{index}] is of type {dialect.shown(entry.get('type'))}; only functions, which "
            "the client calls itself, are supported"
        )
    return dialect.tool(
        entry.get("name"), entry.get("description"), entry.get("parameters"), f"tools[{index}]"
    )


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Items that are one answer of the model become one message again."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "function_call_output":
        said = dialect.text_of_parts(item.get("output"), f"{where}.output", _PARTS)
        id = str(item.get("call_id") or "")
        messages.append({"role": "tool", "content": said, "tool_call_id": id})
        return
    if kind == "function_call":
        call = dialect.call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
        _assistant(messages)["tool_calls"] = [*_assistant(messages).get("tool_calls", ()), call]
        return
    if kind != "message":
        raise BadRequest(f"{where} is of type {dialect.shown(kind)}, which is not supported")
    role = item.get("role")
    if role not in _ROLES:
        raise BadRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, it is {dialect.shown(role)}"
        )
    text = dialect.text_of_parts(item.get("content"), f"{where}.content", _PARTS)
    messages.append({"role": role, "content": text})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
