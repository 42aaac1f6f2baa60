"""What the server says: JSON, whose texts are bounded, and errors of three parts."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

MAX_TEXT = 100_000
"""Characters of one text; longer ones are cut, and marked."""


def answer(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(as_json(value), status, media_type="application/json")


def as_json(value: Any) -> str:
    """JSON without NaN and Infinity, which it does not have: they become null. Half characters are
    escaped.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def cut(text: str, size: int = MAX_TEXT) -> str:
    """The beginning of a text, with a mark where something is left out."""
    if len(text) <= size:
        return text
    return f"{text[:size]}… [cut: {len(text) - size} more characters]"


def error(parts: tuple[str, ...], status: int) -> Response:
    return answer(as_error(parts), status)


def as_error(parts: tuple[str, ...]) -> dict[str, list[str]]:
    return {"error": [*parts, *("",) * (3 - len(parts))]}
