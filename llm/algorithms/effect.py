"""What a term of an algorithm declares besides its default: which values it may have, beside which
other terms it counts, and which terms change with it.

    dual_clip: float = term(0.0, WITH_DUAL_CLIP, bound=OFF_OR_ABOVE_ONE, off=0.0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from unirl.errors import UniRLError


class Bound(NamedTuple):
    holds: Callable[[Any], bool]
    rule: str
    remedy: str = "leave it out for the preset's"


class Condition(NamedTuple):
    """Beside which other terms a term counts."""

    holds: Callable[[Any], bool]
    """Asked of an Algorithm."""
    where: str
    """The same in words, after "it has an effect only"."""
    by: tuple[str, ...]
    """The terms that decide it."""


class TermRules(NamedTuple):
    conditions: tuple[Condition, ...] = ()
    bound: Bound | None = None
    off: Any = None
    """The value that says it is off, which is true everywhere."""
    brings: Mapping[Any, Mapping[str, Any]] = MappingProxyType({})
    """By its value: other terms that go with it, where the preset has another value."""


def term(
    default: Any,
    *conditions: Condition,
    bound: Bound | None = None,
    off: Any = None,
    brings: Mapping[Any, Mapping[str, Any]] = MappingProxyType({}),
    infinite: bool = False,
) -> Any:
    """infinite: whether the term may be."""
    rules = TermRules(conditions, bound, off, brings)
    return field(default=default, metadata={"rules": rules, "infinite": infinite})


def rules_of(terms: Any) -> dict[str, TermRules]:
    """The terms of a dataclass or of an instance, by name."""
    return {item.name: item.metadata["rules"] for item in fields(terms) if "rules" in item.metadata}


def check_effect(algorithm: Any, chosen: Mapping[str, Any]) -> None:
    """Raise UniRLError for a term that was chosen and does nothing in this Algorithm. A preset may
    hold such values: they wait for the choice that needs them.
    """
    for name, rules in rules_of(algorithm).items():
        if name not in chosen or chosen[name] == rules.off:
            continue
        for condition in rules.conditions:
            # A coefficient that is set to 0 turns off what belongs to it, deliberately.
            off = any(chosen.get(by) == 0 for by in condition.by)
            if off or condition.holds(algorithm):
                continue
            now = ", ".join(
                f"algorithm.{by} is {plain(getattr(algorithm, by))}" for by in condition.by
            )
            raise UniRLError(
                f"algorithm.{name} is {plain(chosen[name])}, and {now}",
                f"{name} has an effect only {condition.where}",
                f"leave algorithm.{name} out, or set algorithm.{condition.by[0]} to what it needs",
            )


def plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
