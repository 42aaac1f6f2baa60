"""From TOML and tables to a config, with every key and value checked."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from unirl.config.field_help import flag_of
from unirl.config.fields import dataclass_in, default, fields, hints, kind_at
from unirl.config.rules import check_finite
from unirl.config.spelling import unknown_key
from unirl.config.tables import canonical, merge, nest
from unirl.config.values import Spelled, as_text, checked
from unirl.config.wording import describe
from unirl.config.writing import to_mapping
from unirl.errors import UniRLError, suggestion

T = TypeVar("T")


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UniRLError, with the line, when it is missing or wrong."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        near = suggestion(path.name, [p.name for p in path.parent.glob("*.toml")])
        raise UniRLError(
            f'config file "{path}" does not exist',
            f'there is no such file in "{path.parent}"',
            near or "check the path; shipped configs: unirl list configs",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UniRLError(
            f'config file "{path}" is not TOML',
            str(error),
            'mind the quotes around strings: id = "CartPole-v1"',
        ) from None
    except OSError as error:
        raise UniRLError(
            f'config file "{path}" cannot be read',
            f"the system says: {error.strerror}",
            "check the path and its permissions",
        ) from None


def from_mapping(cls: type[T], mapping: Mapping[str, Any]) -> T:
    """The config that nested tables describe; keys that are absent keep their defaults.

    Raises UniRLError for a key that is unknown or missing, and for a value of another type. The
    classes' own rules (`__post_init__`) apply once, to the finished tables.
    """
    check_keys(cls, mapping)
    config = _build(cls, mapping, "")
    check_finite(config)
    return config


def override(config: T, changes: Mapping[str, Any]) -> T:
    """A copy with some keys changed: {"run.total_steps": 1e6} or {"run": {"total_steps": 1e6}}.

    Hyphens in keys count as underscores. A string is parsed by its field's type: "1e6", "none";
    not so within a table that may hold anything, such as env.kwargs.
    """
    cls = type(config)
    marked = {
        key: Spelled(value)
        if isinstance(value, str)
        else as_text(value, kind_at(cls, canonical(cls, key)))
        for key, value in changes.items()
    }
    return from_mapping(cls, merge(to_mapping(config), nest(cls, marked)))


def check_keys(cls: type, mapping: Mapping[str, Any], source: str = "") -> None:
    """Raise UniRLError, naming `source`, when a nested table has a key that the config has not."""

    def visit(kind: Any, table: Mapping[str, Any], prefix: str) -> None:
        hint_of = hints(kind)
        for name, value in table.items():
            if name not in hint_of:
                raise unknown_key(cls, f"{prefix}{name}", source)
            inner = dataclass_in(hint_of[name])
            if inner is not None and isinstance(value, Mapping):
                visit(inner, value, f"{prefix}{name}.")

    visit(cls, mapping, "")


def _build(cls: type[T], mapping: Mapping[str, Any], prefix: str) -> T:
    hint_of = hints(cls)
    values: dict[str, Any] = {}
    for item in fields(cls):
        path, hint, usual = prefix + item.name, hint_of[item.name], default(item)
        inner = dataclass_in(hint)
        value = mapping.get(item.name, MISSING)
        if inner is not None and (
            isinstance(value, Mapping) or (value is MISSING and usual is MISSING)
        ):
            # A parent's default may differ from its class's: a partial table changes the former.
            start = to_mapping(usual) if isinstance(usual, inner) else {}
            given = {} if value is MISSING else value
            values[item.name] = _build(inner, merge(start, given), path + ".")
        elif value is not MISSING:
            values[item.name] = checked(value, hint, path, usual)
        elif usual is not MISSING:
            values[item.name] = usual
        else:
            raise _missing(path, hint)
    return cls(**values)


def _missing(path: str, hint: Any) -> UniRLError:
    table, _, name = path.rpartition(".")
    return UniRLError(
        f"{path} is missing",
        f"it has no default; {describe(hint)} is expected",
        f"set {flag_of(path)}, or {name} under [{table}] in the config file"
        if table
        else f"set {flag_of(path)}",
    )
