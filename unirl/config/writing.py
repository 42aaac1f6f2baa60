"""A config as nested dictionaries and as TOML; source: https://toml.io/en/v1.0.0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from unirl.config.fields import defaults, fields
from unirl.config.secrets import redacted
from unirl.errors import UniRLError


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as nested dictionaries; None stays None, tuples stay tuples."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(type(config))}


def to_toml(config: Any, **top: str) -> str:
    """The config as TOML that `from_mapping` reads back to an equal one.

    top: keys above the tables, such as recipe="impala"; a reader takes them out first.
    None is left out where it is the default, and written as "none" where it is not. Of secrets (a
    field's metadata {"secret": True}) only the place where they are kept is written.
    """
    lines = [f"{key} = {_toml(value)}" for key, value in top.items()]
    _write_table(config, defaults(type(config)), "", lines)
    return "\n".join(lines).strip() + "\n"


def value_to_toml(value: Any) -> str:
    """The value of one key as TOML would have it; None is the bare word none."""
    return "none" if value is None else _toml(_plain(value))


def _write_table(config: Any, default_of: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
    tables: list[tuple[str, Any, Any]] = []
    for item in fields(type(config)):
        value, default = getattr(config, item.name), default_of.get(item.name, MISSING)
        if item.metadata.get("secret"):
            value = redacted(value)
        if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
            tables.append((item.name, value, default))
        elif value is not None:
            lines.append(f"{item.name} = {_toml(value)}")
        elif default is not None:
            lines.append(f'{item.name} = "none"')
    for name, value, default in tables:
        if isinstance(value, Mapping):
            _write_mapping(value, prefix + name, default, lines)
            continue
        lines += ["", f"[{prefix}{name}]"]
        _write_table(value, defaults(type(value), default), f"{prefix}{name}.", lines)


def _write_mapping(value: Mapping[str, Any], path: str, default: Any, lines: list[str]) -> None:
    if not value and not default:
        return
    lines += ["", f"[{path}]"]
    for key, child in value.items():
        if not isinstance(child, Mapping):
            lines.append(f"{_toml_key(key)} = {_toml(child, path)}")
    for key, child in value.items():
        if isinstance(child, Mapping):
            _write_mapping(child, f"{path}.{_toml_key(key)}", {"": 0}, lines)


def _toml(value: Any, path: str = "") -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml(item, path) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v, path)}" for k, v in value.items()) + "}"
    raise UniRLError(
        f"{path or 'a value'} holds {value!r}",
        f"TOML has numbers, strings, booleans, lists and tables, but no {type(value).__name__}",
        "leave the key out, or give it one of these",
    )


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "a").replace("_", "a").isalnum()
    return key if bare else _toml(key)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    return value
