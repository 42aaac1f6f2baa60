"""Nested tables: dotted keys nested, and one table out of several."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from unirl.config.fields import dataclass_in, kind_at
from unirl.errors import UniRLError


def nest(cls: type, dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables, hyphens of field names turned into underscores."""
    root: dict[str, Any] = {}
    for key, value in dotted.items():
        *parents, last = canonical(cls, key).split(".")
        table = root
        for parent in parents:
            child = table.setdefault(parent, {})
            if not isinstance(child, dict):
                raise UniRLError(
                    f"{key} is set, and so is {parent}",
                    "the second holds the first",
                    "set one of them",
                )
            table = child
        if isinstance(value, Mapping):
            kind = dataclass_in(kind_at(cls, canonical(cls, key)))
            inner = nest(kind, value) if kind is not None else dict(value)
            held = table.get(last)
            value = merge(held, inner) if isinstance(held, dict) else inner
        table[last] = value
    return root


def canonical(cls: type, key: str) -> str:
    """A dotted key with underscores in the names of fields; keys inside a dictionary stay."""
    parts = key.split(".")
    at: Any = cls
    for index, part in enumerate(parts):
        if not dataclasses.is_dataclass(at):
            break
        parts[index] = part.replace("-", "_")
        at = kind_at(typing.cast(type, at), parts[index])
    return ".".join(parts)


def merge(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """One nested table out of several; where two set a key, the later one wins."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            held = merged.get(key)
            if isinstance(value, Mapping):
                value = merge(held if isinstance(held, dict) else {}, value)
            merged[key] = value
    return merged
