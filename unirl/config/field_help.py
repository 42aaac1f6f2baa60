"""Every key of a config with its type, default and docstring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from unirl.config.fields import (
    dataclass_in,
    defaults,
    docs,
    fields,
    hints,
    is_mapping,
    members,
)
from unirl.config.wording import describe
from unirl.config.writing import value_to_toml


@dataclass(frozen=True)
class FieldHelp:
    """One key of a config, for help texts and for parsing flags."""

    key: str
    """Dotted, as in queue.max_staleness."""
    kind: str
    """The type in words."""
    default: str
    """As TOML would have it; empty when the key is required."""
    doc: str
    """The docstring under the field."""
    is_switch: bool
    """True or false: as a flag it needs no value."""
    is_table: bool
    """A dictionary: dotted keys may continue below it."""
    is_common: bool
    """Its field's metadata says {"common": True}: the short help shows it."""


def fields_help(cls: type) -> list[FieldHelp]:
    """Every key of a config with type, default and docstring; tables after plain keys."""
    return list(_help(cls, defaults(cls), ""))


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def _help(cls: type, default_of: Mapping[str, Any], prefix: str) -> Iterable[FieldHelp]:
    hint_of, doc_of = hints(cls), docs(cls)
    inner: list[tuple[str, type, Any]] = []
    for item in fields(cls):
        hint, default = hint_of[item.name], default_of.get(item.name, MISSING)
        kind = dataclass_in(hint)
        if kind is not None:
            inner.append((item.name, kind, default))
            continue
        yield FieldHelp(
            prefix + item.name,
            describe(hint),
            "" if default is MISSING else value_to_toml(default),
            doc_of.get(item.name, ""),
            is_switch=bool in members(hint),
            is_table=any(is_mapping(member) for member in members(hint)),
            is_common=bool(item.metadata.get("common")),
        )
    for name, kind, default in inner:
        yield from _help(kind, defaults(kind, default), f"{prefix}{name}.")
