"""The body of a request: an object in JSON, whose texts can be encoded."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from unirl.llm.endpoint.dialect import BadRequest

MAX_BODY = 32 << 20
"""Bytes of a request."""


async def read_body(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> dict[str, Any]:
    """receive: of ASGI. Raises BadRequest."""
    data, message = bytearray(), dict[str, Any](more_body=True)
    while message.get("more_body"):
        message = dict(await receive())
        if message["type"] == "http.disconnect":
            raise BadRequest.left()
        data += message.get("body", b"")
        if len(data) > MAX_BODY:
            raise BadRequest(f"a request may have {MAX_BODY} bytes at most", 413)
    try:
        body: Any = json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise BadRequest("the body is nested too deep") from None
    except ValueError as error:
        raise BadRequest(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object, it is {type(body).__name__}")
    if b"\\ud" in data or b"\\uD" in data:
        body = _whole_characters(body)
    found: dict[str, Any] = body
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _whole_characters(value: Any) -> Any:
    """Without halves of surrogate pairs, which no encoding can write."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole_characters(each) for each in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(each) for key, each in value.items()}
    return value
