"""Requests as broken clients send them: right ones with parts replaced, cut, or nested; and bytes
that are no request.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import socket
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


KINDS = ("right", "leaves", "cut", "length", "chunks", "head", "line", "headers", "twice", "noise")


def raw(seed: int, count: int, key: str) -> Iterator[tuple[str, bytes, bool]]:
    """What happens to a request, the bytes of a connection, and whether an answer must come."""
    chance = random.Random(seed)
    for path, body, _ in bodies(seed, count):
        line = [b"POST", f"/v1/{path}".encode(), b"HTTP/1.1"]
        heads = [b"Host: localhost", b"Authorization: Bearer " + key.encode(),
                 b"Content-Type: application/json", b"Connection: close"]  # fmt: skip
        length = b"Content-Length: %d" % len(body)
        kind = chance.choice(KINDS)
        if kind == "length":
            length = chance.choice(
                [b"", b"Content-Length: -1", b"Content-Length: x", length + b"0",
                 length + b"\r\nContent-Length: 3", length + b"9" * 18, b"Content-Length: 3"]
            )  # fmt: skip
        elif kind == "chunks":
            length = b"Transfer-Encoding: " + chance.choice([b"chunked", b"gzip", b"chunked, x"])
            sizes = [b"%x" % len(body), b"-1", b"zz", b"ffffffffff", b"%x" % (len(body) + 9), b""]
            body = chance.choice(sizes) + b"\r\n" + body + b"\r\n0\r\n\r\n"
        elif kind == "line":
            line[chance.randrange(3)] = chance.choice(
                [b"", b"GET", b"OPTIONS", b"\x00", b"HTTP/1.0", b"HTTP/9.9", b"/" * 70_000, b"*",
                 b"/%zz%00%ff", b"http://x/v1/models", b"//v1/..", "/\u00e9".encode(), b"/s//v1/"]
            )  # fmt: skip
        elif kind == "headers":
            heads += chance.choice(
                [[b"X: " + b"y" * 100_000], [b"X: y"] * 3000, [b"X\x00: y"], [b": y"],
                 [b"no colon"], [b"Host: other"], [b"Expect: 100-continue"],
                 [b"Authorization: \xff\xfe"], [b"X-Session-ID: \xe9"],
                 [b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"]]
            )  # fmt: skip
        data = b"\r\n".join([b" ".join(line), *heads, length, b"", body])
        if kind == "cut":
            data = data[: chance.randrange(len(data))]
        elif kind == "twice":
            data = data.replace(b"Connection: close\r\n", b"") + data
        elif kind == "noise":
            data = chance.randbytes(chance.randrange(1, 300))
        elif kind == "head":
            place = chance.randrange(data.index(b"\r\n\r\n"))
            data = data[:place] + chance.randbytes(1) + data[place + 1 :]
        yield kind, data, kind == "right"


def statuses(address: tuple[str, int], data: bytes, kind: str) -> list[int]:
    """Of the answers that come of these bytes."""
    found = bytearray()
    with socket.create_connection(address, timeout=20.0) as one, contextlib.suppress(OSError):
        one.sendall(data)
        if kind == "leaves":
            return []
        if kind not in ("right", "twice"):
            one.settimeout(0.02)  # it may wait for more, which never comes
        while piece := one.recv(1 << 16):
            found += piece
    return [int(each) for each in re.findall(rb"^HTTP/1\.1 (\d+) ", found, re.MULTILINE)]


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
