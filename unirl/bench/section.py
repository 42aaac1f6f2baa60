"""The section of a config that is of a given class, whatever a recipe calls it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def section(config: Any, kind: type[T]) -> tuple[str, T] | None:
    """Its name and value; None where the config has none."""
    if not dataclasses.is_dataclass(config):
        return None
    for name in (item.name for item in dataclasses.fields(config)):
        value = getattr(config, name)
        if isinstance(value, kind):
            return name, value
    return None
