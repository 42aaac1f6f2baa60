"""The section `algorithm` of a recipe for language models."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from unirl.errors import UniRLError
from unirl.llm.algorithms.effect import rules_of
from unirl.llm.algorithms.terms import Terms

T = TypeVar("T", bound=type)


def _may_be_unset(cls: T) -> T:
    """Let each term that a class inherits be None, which is its default."""
    hints = get_type_hints(Terms)
    for item in fields(Terms):
        if "rules" in item.metadata:
            cls.__annotations__[item.name] = hints[item.name] | None
            setattr(cls, item.name, field(default=None, metadata=item.metadata))
    return cls


@dataclass(frozen=True)
@_may_be_unset
class AlgorithmConfig(Terms):
    """What is learned from rewards. A term that is not set (none) is as the preset has it; when the
    objective or the correction is changed, its bounds are those of the new one. What is set and
    would have no effect is refused.
    """

    preset: str = field(default="unirl:grpo", metadata={"common": True})

    def __post_init__(self) -> None:
        for name, value in self.chosen().items():
            bound = rules_of(self)[name].bound
            if bound is not None and not bound.holds(value):
                raise UniRLError(f"algorithm.{name} is {value}", f"it {bound.rule}", bound.remedy)

    def chosen(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in rules_of(self)}
        return {name: value for name, value in values.items() if value is not None}
