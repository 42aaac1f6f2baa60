"""JSON schemas: of a function, from its signature and docstring; and values checked against them.

Only what a call can get wrong is checked here; a server of tools checks the rest itself.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from unirl.errors import UniRLError

Schema = Mapping[str, Any]
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_KNOWN = "str, int, float, bool, Literal, list, dict, None, and unions of them"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What OpenAI's API takes as the name of a function."""


def schema_of(function: Callable[..., Any], what: str, skip: int = 0) -> tuple[str, dict[str, Any]]:
    """Description and parameters of a function. what: how messages call it. skip: parameters at the
    front that no caller gives. Raises UniRLError for one that no schema can describe.
    """
    description, notes = _docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a name in an annotation may be anything
        raise UniRLError(
            f"{what} has annotations that cannot be read",
            f"{type(error).__name__}: {error}",
            "import what they name where the function is defined",
        ) from error
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in list(inspect.signature(function).parameters.items())[skip:]:
        where = f"parameter {name} of {what}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UniRLError(
                f"{where} is {parameter.kind.description}",
                "a model gives each argument by its name",
                "write the parameters out",
            )
        if name not in hints:
            raise UniRLError(
                f"{where} has no type",
                f"it must be annotated; what can be described is {_KNOWN}",
                f"write {name}: str, if it is text",
            )
        found = _schema(hints[name], where)
        if name in notes:
            found = {**found, "description": notes[name]}
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            found = {**found, "default": _default(parameter.default, where)}
        properties[name] = found
    return description, {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def complaint(value: Any, schema: Schema, where: str = "") -> str:
    """What is wrong with a value, in words for a model; "" where nothing is."""
    at = where or "the arguments"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found = [complaint(value, each, where) for each in schema[key]]
            return "" if "" in found else " or ".join(dict.fromkeys(found))
    if "enum" in schema and value not in schema["enum"]:
        return f"{at} must be one of {json.dumps(schema['enum'])}, not {_shown(value)}"
    if "const" in schema and value != schema["const"]:
        return f"{at} must be {json.dumps(schema['const'])}, not {_shown(value)}"
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(names, list) and not any(_is(value, name) for name in names):
        return f"{at} must be of type {' or '.join(map(str, names))}, not {_shown(value)}"
    for key, is_wrong in (("minimum", operator.lt), ("maximum", operator.gt)):
        limit: Any = schema.get(key)
        if _is(value, "number") and _is(limit, "number") and is_wrong(value, limit):
            return f"{at} must have {key} {limit}, not {_shown(value)}"
    if isinstance(value, dict):
        return _object_complaint(value, schema, where)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        found = [complaint(each, schema["items"], f"{at}[{i}]") for i, each in enumerate(value)]
        return next(filter(None, found), "")
    return ""


def _object_complaint(value: dict[str, Any], schema: Schema, where: str) -> str:
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            return f"{where or 'the call'} lacks {name}"
    for name, each in value.items():
        if name in properties:
            found = complaint(each, properties[name], f"{where}.{name}" if where else name)
            if found:
                return found
        elif schema.get("additionalProperties") is False:
            known = ", ".join(properties) or "none"
            return f"{where or 'the call'} has no argument {name}; there are: {known}"
        elif isinstance(rest := schema.get("additionalProperties"), Mapping):
            found = complaint(each, rest, f"{where}.{name}" if where else name)
            if found:
                return found
    return ""


def checked_parameters(parameters: Any, what: str) -> Schema:
    """The schema of a tool that a server names; UniRLError where it is none."""
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise UniRLError(
            f"{what} has no schema of its arguments",
            f'it must be a JSON schema of type "object", and is {parameters!r:.80}',
            "correct the tool, or leave it out",
        )
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise UniRLError(
            f"{what} has an invalid schema",
            f"properties must be an object, and is {parameters['properties']!r:.80}",
            "correct the tool, or leave it out",
        )
    return {"type": "object", "properties": {}, **parameters}


def _schema(kind: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind is Any:
        return {}
    if kind is type(None):
        return {"type": "null"}
    if origin is typing.Annotated:
        words = [each for each in args[1:] if isinstance(each, str)]
        return _schema(args[0], where) | ({"description": words[0]} if words else {})
    if origin is Literal:
        return {"enum": [_default(each, where) for each in args]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in args]}
    if kind is list or origin is list:
        return {"type": "array"} | ({"items": _schema(args[0], where)} if args else {})
    if kind is dict or (origin is dict and args[0] is str):
        inner = _schema(args[1], where) if args else {}
        return {"type": "object"} | ({"additionalProperties": inner} if inner else {})
    raise UniRLError(
        f"{where} has the type {getattr(kind, '__name__', kind)}",
        f"what can be described to a model is {_KNOWN}",
        "give it one of these types",
    )


def _default(value: Any, where: str) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UniRLError(
            f"{where} has the value {value!r:.60}",
            f"it must be a value of JSON ({error})",
            "use None as the default, or a plain value",
        ) from error
    return value


def _is(value: Any, name: str) -> bool:
    if name == "number":
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        return ok and (isinstance(value, int) or math.isfinite(value))
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    kinds = {
        "string": str, "boolean": bool, "array": list, "object": dict, "null": type(None),
    }  # fmt: skip
    return name not in kinds or isinstance(value, kinds[name])


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what "Args:" or ":param x:" says of each parameter."""
    notes = {
        name: " ".join(note.split())
        for name, note in re.findall(r"^:param (?:\w+ )?(\w+): *(.*(?:\n[ \t]+.*)*)", text, re.M)
    }
    text = re.split(r"^:(?:param|returns?|raises)\b", text, maxsplit=1, flags=re.M)[0]
    parts = re.split(r"^(Args|Arguments|Parameters|Returns|Raises):[ \t]*$", text, flags=re.M)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Returns", "Raises"):
            continue
        for name, note in re.findall(r"^ +(\w+)(?: *\([^)]*\))?: *(.*(?:\n {5,}.*)*)", body, re.M):
            notes[name] = " ".join(note.split())
    return parts[0].strip(), notes
