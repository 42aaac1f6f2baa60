"""What a dataclass says about its fields: names, types, defaults and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from typing import Any, Union, get_args, get_origin


def fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields that can be set, in order."""
    return [item for item in dataclasses.fields(cls) if item.init]


def hints(cls: Any) -> dict[str, Any]:
    found = typing.get_type_hints(cls)
    return {item.name: found[item.name] for item in fields(cls)}


def default(item: dataclasses.Field[Any]) -> Any:
    """A field's default, new each time where a factory makes it; MISSING when it is required."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def defaults(cls: type, instance: Any = None) -> dict[str, Any]:
    """Defaults by name: those of `instance` when there is one, else the class's (or MISSING)."""
    if isinstance(instance, cls):
        return {item.name: getattr(instance, item.name) for item in fields(cls)}
    return {item.name: default(item) for item in fields(cls)}


def docs(cls: type) -> dict[str, str]:
    """The docstrings under the fields of a class and its parents, where the source is at hand."""
    found: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(parent):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(parent)))
        except (OSError, TypeError, SyntaxError):
            continue
        found.update(_docs_below(typing.cast(ast.ClassDef, tree.body[0]).body))
    return found


def _docs_below(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for item, below in itertools.pairwise(body):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield item.target.id, inspect.cleandoc(below.value.value)


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_mapping(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


def dataclass_in(hint: Any) -> type | None:
    """The dataclass that a field of this type may hold."""
    for member in members(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return member
    return None


def kind_at(cls: type, path: str) -> Any:
    """The type at a dotted path: a dataclass where the field holds one, None without a field."""
    at: Any = cls
    for name in path.split("."):
        if not dataclasses.is_dataclass(at):
            return None
        hint = hints(at).get(name)
        at = dataclass_in(hint) or hint
    return at
