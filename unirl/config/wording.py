"""Types and values in words, for messages and help texts."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from unirl.config.fields import is_mapping, members


def describe(hint: Any) -> str:
    """A type: 'an integer', 'a list of 2 numbers or "none"'."""
    parts: list[str] = []
    for member in members(hint):
        origin = get_origin(member) or member
        if origin is Literal:
            parts += [shown(choice) for choice in get_args(member)]
        elif origin in (tuple, list):
            parts.append(_describe_list(origin, get_args(member)))
        elif is_mapping(member) or dataclasses.is_dataclass(member):
            parts.append("a table")
        else:
            names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
            names |= {types.NoneType: '"none"', Path: "a path", Any: "a value"}
            parts.append(names.get(member, getattr(member, "__name__", str(member))))
    return " or ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def _describe_list(origin: Any, arguments: tuple[Any, ...]) -> str:
    inner = [argument for argument in arguments if argument is not Ellipsis]
    plain = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}
    word = plain.get(inner[0], "values") if inner and len(set(inner)) == 1 else "values"
    fixed = origin is tuple and Ellipsis not in arguments
    return f"a list of {len(inner)} {word}" if fixed else f"a list of {word}"


def kind_of(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number that is not whole" if math.isfinite(value) else f"{value}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, Sequence) else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """A value as messages show it, long ones cut."""
    text = json.dumps(str(value), ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
