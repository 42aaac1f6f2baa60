"""Which values of which settings are tried: choices or ranges by config key, as `[space]` of a
sweep and `population.vary` have them.

    [space]
    learner.entropy_coef = [0.0, 0.01]
    learner.optimizer.lr = { low = 1e-4, high = 1e-2, log = true }
"""

from __future__ import annotations

import contextlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from unirl.config import check_keys, nest
from unirl.config.fields import kind_at, members
from unirl.config.tables import canonical
from unirl.errors import UniRLError, suggestion

_RANGE = ("low", "high", "log", "step")


@dataclass(frozen=True)
class Choices:
    """One of several values."""

    values: tuple[Any, ...]

    def draw(self, random: Random) -> Any:
        return random.choice(self.values)

    def grid(self) -> tuple[Any, ...] | None:
        return self.values

    def ends(self) -> tuple[Any, ...]:
        """Values that must fit where all others are to fit."""
        return self.values


@dataclass(frozen=True)
class Range:
    """A number from low to high. log: drawn evenly over its logarithm. step: low, low + step, and
    so on.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False
    """Integers alone."""

    def draw(self, random: Random) -> float:
        if (grid := self.grid()) is not None:
            return random.choice(grid)
        top = self.high + self.whole  # integers are drawn by what they are the floor of
        if self.log:
            value = math.exp(random.uniform(math.log(self.low), math.log(top)))
        else:
            value = random.uniform(self.low, top)
        return self.nearest(math.floor(value) if self.whole else value)

    def nearest(self, value: float) -> float:
        """The number in the range that is nearest."""
        value = min(max(value, self.low), self.high)
        if self.step is not None:
            value = self.low + round((value - self.low) / self.step) * self.step
        return round(value) if self.whole else float(f"{value:.6g}")

    def grid(self) -> tuple[float, ...] | None:
        """All of its values; None without a step."""
        if self.step is None:
            return None
        number = int((self.high - self.low) / self.step + 1e-9) + 1
        return tuple(self.nearest(self.low + index * self.step) for index in range(number))

    def ends(self) -> tuple[float, ...]:
        return (self.nearest(self.low), self.nearest(self.high))


Dimension: TypeAlias = Choices | Range
SearchSpace: TypeAlias = Mapping[str, Dimension]


def read_space(cls: type, table: Mapping[str, Any], where: str) -> dict[str, Dimension]:
    """The space that a table describes, by dotted key. Raises UniRLError, naming `where`, for a key
    that the config has not, and for what is neither choices nor a range.
    """
    space: dict[str, Dimension] = {}
    for spelled, value in _flat(table, ""):
        key = canonical(cls, spelled)
        check_keys(cls, nest(cls, {key: 0}), where)
        space[key] = _dimension(key, _read(value), kind_at(cls, key), where)
    return space


def _read(value: Any) -> Any:
    """What a flag said, as a file would: text that is a table or a list of TOML or JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        for parse in (lambda text: tomllib.loads(f"value = {text}")["value"], json.loads):
            with contextlib.suppress(ValueError):
                return parse(value)
    return value


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys: a table without a word of a range holds more of them."""
    for name, value in table.items():
        if isinstance(value, Mapping) and not set(value) & set(_RANGE):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _dimension(key: str, value: Any, kind: Any, where: str) -> Dimension:
    if isinstance(value, list | tuple) and value:
        return Choices(tuple(value))
    if not isinstance(value, Mapping):
        raise UniRLError(
            f"{key} is {value!r} ({where})",
            "it must be choices, [a, b, ...], or a range, { low = a, high = b }",
            f"to set it to one value, write [{value!r}], or set it outside of the space",
        )
    _check_range(key, value, where)
    whole = int in members(kind) and float not in members(kind)
    numbers = {name: value[name] for name in ("low", "high", "step") if name in value}
    if whole and any(number != int(number) for number in numbers.values()):
        raise UniRLError(
            f"{key} goes from {value['low']} to {value['high']} ({where})",
            "the setting is an integer, and so must be low, high and step",
            f"write {{ low = {round(value['low'])}, high = {round(value['high'])} }}",
        )
    return Range(**numbers, log=value.get("log", False), whole=whole)


def _check_range(key: str, value: Mapping[str, Any], where: str) -> None:
    for name in value:
        if name not in _RANGE:
            raise UniRLError(
                f'{key} has "{name}" ({where})',
                f"a range has {', '.join(_RANGE)}",
                suggestion(name, _RANGE) or "leave it out",
            )
    numbers: list[Any] = [value.get(name) for name in ("low", "high")]
    sound = all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
    low, high = (float(n) for n in numbers) if sound else (0.0, 0.0)
    if not low < high or not isinstance(value.get("log", False), bool):
        raise UniRLError(
            f"{key} goes from {numbers[0]} to {numbers[1]} ({where})",
            "low and high must be finite numbers, low < high, and log true or false",
            "write { low = 1e-4, high = 1e-2, log = true }, say",
        )
    if value.get("log") and (low <= 0 or "step" in value):
        raise UniRLError(
            f"{key} goes from {low:g} to {high:g} by its logarithm ({where})",
            "low > 0 must hold, and there can be no step",
            "leave log out, or list the values: [1e-4, 1e-3, 1e-2]",
        )
    step = value.get("step", high - low)
    if type(step) not in (int, float) or not 0 < step <= high - low:
        raise UniRLError(
            f"{key} has step {step} ({where})",
            f"0 < step <= high - low = {high - low:g} must hold",
            f"write step = {(high - low) / 4:g}, or leave it out",
        )
