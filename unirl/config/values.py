"""One value against the type of its field: text is parsed, all else must fit."""

from __future__ import annotations

import contextlib
import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from unirl.config.field_help import flag_of
from unirl.config.fields import dataclass_in, fields, hints, is_mapping, members
from unirl.config.wording import describe, kind_of, shown
from unirl.config.writing import value_to_toml
from unirl.errors import UniRLError, suggestion

SWITCH_WORDS: Mapping[str, bool] = MappingProxyType(
    {word: True for word in ("true", "yes", "on", "1")}
    | {word: False for word in ("false", "no", "off", "0")}
)
"""What may be typed for true and false."""


class Text(str):
    """A value as typed behind a flag: its field's type parses it. TOML brings types of its own."""

    __slots__ = ()


class Spelled(Text):
    """A string that a program gave: parsed alike, but nobody typed a flag."""

    __slots__ = ()


class _Misfit(Exception):
    """A value does not fit a type."""


def checked(value: Any, hint: Any, path: str, default: Any) -> Any:
    """The value as its field wants it. Raises UniRLError, naming the path, when it does not fit."""
    try:
        return _fit(value, hint)
    except _Misfit:
        pass
    table = _literal(value) if isinstance(value, Text) else value
    if isinstance(table, Mapping) and any(map(is_mapping, members(hint))):
        for key, child in table.items():  # one of them it is, and it says more than the whole
            checked(child, _child_kind(hint), f"{path}.{key}", MISSING)
    flag = isinstance(value, Text) and not isinstance(value, Spelled)
    raise UniRLError(
        f"flag {flag_of(path)} is {shown(value)}" if flag else f"{path} is {shown(value)}",
        f"expected {describe(hint)}, found {_found(value) if flag else kind_of(value)}",
        _remedy(value, hint, path, default),
    )


def _found(text: Text) -> str:
    number = _parse_number(text)
    return "other text" if number is None else kind_of(number)


def _remedy(value: Any, hint: Any, path: str, default: Any) -> str:
    literals = [member for member in members(hint) if get_origin(member) is Literal]
    choices = [str(choice) for member in literals for choice in get_args(member)]
    near = suggestion(value, choices) if isinstance(value, str) else ""
    inner = dataclass_in(hint)
    if near:
        return near
    if inner is not None:
        return f"set the keys below it, such as {path}.{fields(inner)[0].name}"
    if default is not MISSING:
        return f"the default is {value_to_toml(default)}"
    return f"give it {describe(hint)}"


def _fit(value: Any, hint: Any) -> Any:
    """The value as the type wants it, or _Misfit. A Text is parsed; all else must fit as it is."""
    alternatives = members(hint)
    # Where "none" is one of a field's own choices it is that choice, and None is to leave it out.
    choices = [choice for member in alternatives for choice in get_args(member)]
    unset = isinstance(value, str) and value.lower() == "none" and "none" not in choices
    if types.NoneType in alternatives and (value is None or unset):
        return None
    # Text fits every str, so a str member is asked last.
    for member in sorted(alternatives, key=lambda m: m is str):
        try:
            return _fit_one(value, member)
        except _Misfit:
            continue
    raise _Misfit


def _fit_one(value: Any, hint: Any) -> Any:
    text = isinstance(value, Text)
    origin = get_origin(hint) or hint
    if origin is Literal:
        for choice in get_args(hint):
            if (text and value == str(choice)) or (type(value) is type(choice) and value == choice):
                return choice
        raise _Misfit
    if hint is bool:
        return _fit_switch(value)
    if hint in (int, float):
        return _fit_number(value, hint)
    if hint is str and isinstance(value, str):
        return str(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if origin in (tuple, list):
        return _fit_sequence(value, origin, get_args(hint))
    if is_mapping(hint):
        return _fit_mapping(value, get_args(hint))
    if hint is Any or hint is object:
        return _literal(value) if text else value
    if isinstance(hint, type) and isinstance(value, hint) and not text:
        return value
    raise _Misfit


def _fit_switch(value: Any) -> bool:
    if isinstance(value, Text):
        value = SWITCH_WORDS.get(value.lower())
    if not isinstance(value, bool):
        raise _Misfit
    return value


def _fit_number(value: Any, hint: type) -> int | float:
    if isinstance(value, Text):
        value = _parse_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise _Misfit
    if hint is float:
        with contextlib.suppress(OverflowError):
            return float(value)
        raise _Misfit
    if isinstance(value, float) and not value.is_integer():
        raise _Misfit
    return int(value)


def _parse_number(text: Text) -> int | float | None:
    # int first: a float would round what is above 2**53.
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def _fit_sequence(value: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, Text):
        stripped = value.strip()
        if stripped.startswith("["):
            value = _literal(Text(stripped))
        else:
            parts = stripped.strip("()").split(",")
            value = [Text(part.strip()) for part in parts if part.strip()]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _Misfit
    if origin is list or arguments[-1:] == (Ellipsis,):
        kinds = [arguments[0] if arguments else Any] * len(value)
    else:
        kinds = list(arguments)
    if len(kinds) != len(value):
        raise _Misfit
    return origin(_fit(item, kind) for item, kind in zip(value, kinds, strict=True))


def _fit_mapping(value: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    if isinstance(value, Text):
        value = _literal(value)
    if not isinstance(value, Mapping):
        raise _Misfit
    kind = arguments[1] if arguments else Any
    return {str(key): _fit(child, kind) for key, child in value.items()}


def _literal(text: Text) -> Any:
    """JSON where it is JSON, else the words themselves."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, str(text))


def as_text(value: Any, hint: Any) -> Any:
    """Every string in a value of this type marked, so that its field's type parses it. Where any
    type will do, such as in env.kwargs, a string is what was meant.
    """
    if isinstance(value, Mapping):
        inner = dataclass_in(hint)
        hint_of = hints(inner) if inner is not None else {}
        rest = _child_kind(hint)
        return {key: as_text(child, hint_of.get(key, rest)) for key, child in value.items()}
    return Spelled(value) if isinstance(value, str) and hint is not Any else value


def _child_kind(hint: Any) -> Any:
    """The type of a dictionary's values."""
    kinds = [get_args(member)[1] for member in members(hint) if len(get_args(member)) == 2]
    return kinds[0] if kinds and any(map(is_mapping, members(hint))) else Any
