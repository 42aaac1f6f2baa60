"""Rules that many configs state: a setting below its bound fails with the bound. And one that all
of them keep: a number is finite, unless its field says that infinity has a meaning there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from unirl.config.fields import default, fields, hints, is_mapping, members
from unirl.errors import UniRLError

INFINITE = "infinite"
"""Key of a field's metadata, {"infinite": True}: the setting may be infinite."""


def check_finite(config: object, prefix: str = "") -> None:
    """Raise UniRLError where a number of a config, or of one in it, is NaN, or infinite without
    leave. Tables that may hold anything, such as env.kwargs, are not looked into.
    """
    hint_of = hints(type(config))
    for item in fields(type(config)):
        value, key = getattr(config, item.name), prefix + item.name
        if dataclasses.is_dataclass(value):
            check_finite(value, f"{key}.")
        for name, number in _numbers(value, hint_of[item.name]):
            if math.isnan(number) or (math.isinf(number) and not item.metadata.get(INFINITE)):
                usual = default(item)
                of_use = isinstance(usual, int | float) and math.isfinite(usual)
                raise UniRLError(
                    f"{key}{name} is {number}",
                    "it must be a finite number",
                    f"the default is {usual}" if of_use else "leave it out",
                )


def _numbers(value: Any, hint: Any) -> Iterator[tuple[str, float]]:
    """Each number of a setting, with what its key continues with."""
    if isinstance(value, float):
        yield "", value
    elif isinstance(value, tuple | list):
        yield from ((f"[{i}]", one) for i, one in enumerate(value) if isinstance(one, float))
    elif isinstance(value, Mapping):
        kinds = [get_args(member)[-1:] for member in members(hint) if is_mapping(member)]
        if (float,) in kinds:
            yield from ((f".{name}", one) for name, one in value.items())


def check_at_least(least: int, table: str, config: object, *names: str) -> None:
    """Raise UniRLError unless each of these settings of `config`, the keys of `table`, is that
    large, or None.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise UniRLError(
                f"{table}.{name} is {value}",
                f"{table}.{name} >= {least} must hold",
                f"set it to {least} or more",
            )


def check_positive(key: str, value: float | None, remedy: str) -> None:
    """Raise UniRLError unless the setting is > 0, or None."""
    check_setting(value is None or value > 0, key, value, "must be > 0", remedy)


def check_setting(holds: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise UniRLError unless the rule holds for a setting."""
    if not holds:
        raise UniRLError(f"{key} is {value}", f"it {rule}", remedy)
