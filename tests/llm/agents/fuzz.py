"""Requests as broken clients send them: right ones with parts replaced, cut, or nested."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

FUNCTION = {"name": "add", "parameters": {"type": "object"}, "description": "adds"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RIGHT: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stop": ["x"],
        "max_tokens": 3,
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "logprobs": True,
        "n": 1,
    },
    "responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"role": "user", "content": "u"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"type": "reasoning", "summary": []},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "include": [],
        "stream": True,
    },
    "messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}],
            },
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "stream": False,
    },
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**70, 1.5, 1e308, "", "x", "\ud800", "\x00", "é" * 40, [], [[]],
    [None], [0], ["x"], {}, {"type": "x"}, {"type": "text"}, {"text": 3}, {"role": "assistant"},
    [{"type": "image_url", "image_url": {}}], "<|im_end|>", "<tool_call>{", {"function": None},
]  # fmt: skip
HEADERS: list[dict[str, Any]] = [
    {},
    {"x-stainless-retry-count": "1"},
    {"x-stainless-retry-count": b"\xb2"},
    {"x-session-id": "z" * 400},
    {"content-type": "text/plain"},
    {"origin": "https://elsewhere.example"},
    {"origin": "null"},
    {"host": "elsewhere.example"},
]


def bodies(seed: int, count: int) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Path, body and headers of each."""
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice(list(RIGHT))
        body = copy.deepcopy(RIGHT[path])
        for _ in range(chance.choice([0, 1, 1, 2, 4])):
            _spoil(body, chance)
        data = json.dumps(body).encode()
        damage = chance.random()
        if damage < 0.05:
            data = data[: chance.randrange(len(data))]
        elif damage < 0.08:
            data = b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        elif damage < 0.10:
            data = b'{"messages": ' + b'[{"content":' * 900 + b"1" + b"}]" * 900 + b"}"
        elif damage < 0.15:
            place = chance.randrange(len(data))
            data = data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        elif damage < 0.17:
            data = data.replace(b"1", b"NaN", 1)
        headers = {"content-type": "application/json"}
        if chance.random() < 0.4:
            headers |= chance.choice(HEADERS)
        yield path, data, headers


def _spoil(value: Any, chance: random.Random) -> None:
    """Replace, drop or double something, somewhere within."""
    if not value:
        return
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.7:
        _spoil(value[key], chance)
        return
    what = chance.random()
    if what < 0.6:
        value[key] = copy.deepcopy(chance.choice(VALUES))
    elif what < 0.8:
        del value[key]
    elif isinstance(value, list):
        value.append(copy.deepcopy(value[key]))
    else:
        value[f"{key}x"] = value[key]
