"""OpenAI's chat completions, with vLLM's token ids where a client asks for them.

Source: the API's reference, and what clients were seen to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unirl.llm.endpoint import dialect
from unirl.llm.endpoint.dialect import Asked, BadRequest, Event, Found

END = "data: [DONE]\n\n"
error = dialect.openai_error
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PARTS = ("text", "input_text", "output_text", "refusal")
_NO_EFFECT = ("seed", "frequency_penalty", "presence_penalty", "top_logprobs", "logit_bias")


def read(body: Mapping[str, Any]) -> Asked:
    if (dialect.value_of(body, "n", int, "a whole number") or 1) != 1:
        raise BadRequest("n must be 1: ask several times for several answers")
    if body.get("logit_bias"):
        raise BadRequest("logit_bias is not supported: it would change what the model learns from")
    messages = dialect.objects_of(body, "messages")
    if not messages:
        raise BadRequest("messages must hold one message at least")
    tools = [
        dialect.tool(
            function.get("name"),
            function.get("description"),
            function.get("parameters"),
            f"tools[{i}]",
        )
        for i, function in enumerate(map(_function, dialect.objects_of(body, "tools")))
    ]
    stream = dialect.value_of(body, "stream", bool, "true or false") or False
    options = dialect.value_of(body, "stream_options", dict, "an object") or {}
    return Asked(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        tools=tuple(tools),
        stop=dialect.texts_of(body, "stop"),
        max_tokens=dialect.count_of(body, "max_completion_tokens", "max_tokens"),
        model=dialect.value_of(body, "model", str, "a text") or "policy",
        stream=stream,
        usage_in_stream=bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        temperature=dialect.number_of(body, "temperature", 0.0, 100.0),
        top_p=dialect.number_of(body, "top_p", 0.0, 1.0),
        ignored=tuple(key for key in _NO_EFFECT if body.get(key)),
    )


def write(asked: Asked, found: Found) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"refusal": None, **found.answer.message, "content": _content(found)},
        "finish_reason": found.answer.finish,
        "logprobs": _logprobs(found) if asked.logprobs else None,
    }
    if asked.token_ids:
        choice["token_ids"] = list(found.completion.tokens)
    whole = {
        "id": found.id,
        "object": "chat.completion",
        "created": found.created,
        "model": asked.model,
        "choices": [choice],
        "usage": _usage(found),
    }
    return {**whole, "prompt_token_ids": list(found.prompt)} if asked.token_ids else whole


def events(asked: Asked, found: Found) -> Iterator[Event]:
    first: dict[str, Any] = {"role": "assistant", "content": ""}
    extra = {"prompt_token_ids": list(found.prompt)} if asked.token_ids else {}
    yield _chunk(asked, found, first, **extra)
    for piece in dialect.pieces(found.thought):
        yield _chunk(asked, found, {"reasoning_content": piece})
    for piece in dialect.pieces(found.content):
        yield _chunk(asked, found, {"content": piece})
    for index, call in enumerate(found.calls):
        function = call["function"]
        begins = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield _chunk(asked, found, {"tool_calls": [begins]})
        for piece in dialect.pieces(function["arguments"]):
            part = {"index": index, "function": {"arguments": piece}}
            yield _chunk(asked, found, {"tool_calls": [part]})
    last = _chunk(asked, found, {})
    choice = dict(last.data["choices"][0], finish_reason=found.answer.finish)
    if asked.logprobs:
        choice["logprobs"] = _logprobs(found)
    if asked.token_ids:
        choice["token_ids"] = list(found.completion.tokens)
    yield Event("", {**last.data, "choices": [choice]})
    if asked.usage_in_stream:
        yield Event("", {**last.data, "choices": [], "usage": _usage(found)})


def _content(found: Found) -> str | None:
    return found.content or (None if found.calls else "")


def _chunk(asked: Asked, found: Found, delta: Mapping[str, Any], **more: Any) -> Event:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    return Event(
        "",
        {
            "id": found.id,
            "object": "chat.completion.chunk",
            "created": found.created,
            "model": asked.model,
            "choices": [choice],
            **more,
        },
    )


def _logprobs(found: Found) -> dict[str, Any]:
    entries = []
    for token, logp in zip(found.completion.tokens, found.completion.logp, strict=True):
        text = found.text_of(token)
        entries.append(
            {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
        )
    return {"content": entries, "refusal": None}


def _usage(found: Found) -> dict[str, Any]:
    given, drawn = found.num_given, len(found.completion.tokens)
    return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}


def _function(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    if entry.get("type", "function") != "function" or not isinstance(entry.get("function"), dict):
        raise BadRequest('a tool must be {"type": "function", "function": {"name": ...}}')
    found: Mapping[str, Any] = entry["function"]
    return found


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}, it is "
                         f"{dialect.shown(role)}")  # fmt: skip
    found: dict[str, Any] = {
        "role": "tool" if role == "function" else role,
        "content": dialect.text_of_parts(message.get("content"), f"{where}.content", _PARTS),
    }
    if role == "assistant":
        calls = []
        for entry in dialect.objects_of(message, "tool_calls"):
            function = dialect.value_of(entry, "function", dict, "an object") or {}
            name, arguments = function.get("name"), function.get("arguments")
            calls.append(dialect.call(entry.get("id"), name, arguments, f"{where}.tool_calls"))
        if calls:
            found["tool_calls"] = calls
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            found["reasoning_content"] = thought
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str) and found["role"] == "tool":
            found[key] = message[key]
    return found
