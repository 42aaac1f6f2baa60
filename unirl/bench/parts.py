"""The parts of a plan that measuring needs: sections of its config, the policy of whoever acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from unirl.bench.errors import Unmeasurable
from unirl.policy import Policy
from unirl.runners.plan import Plan

T = TypeVar("T")

_DEPTH = 3
"""How deep an actor's policy may lie: the actor, a list of its groups, one of them."""


def section(config: Any, kind: type[T]) -> tuple[str, T] | None:
    """The name and value of the config's section of this class, if it has one."""
    if not dataclasses.is_dataclass(config):
        return None
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, kind):
            return item.name, value
    return None


def slot_rows(plan: Plan) -> int:
    """Environments side by side in one slot. Raises Unmeasurable for slots that are no unrolls."""
    if "mask" not in plan.spec.fields or len(plan.spec.fields["mask"].shape) != 2:
        raise Unmeasurable(
            f'the slots of recipe "{plan.recipe}" have no mask [T, B] to count steps by'
        )
    return plan.spec.fields["mask"].shape[1]


def policies_in(holder: Any) -> list[tuple[Any, str, Policy]]:
    """Every attribute of an actor or learner, or of what it holds, that is a policy: whose it is,
    its name, its value. Raises Unmeasurable when there is none.
    """
    found = list(_policies_in(holder, _DEPTH))
    if not found:
        raise Unmeasurable(f"{type(holder).__name__} holds no unirl.policy.Policy")
    return found


def _policies_in(holder: Any, depth: int) -> Iterator[tuple[Any, str, Policy]]:
    for name, value in getattr(holder, "__dict__", {}).items():
        if isinstance(value, Policy):
            yield holder, name, value
        elif depth > 1:
            for inner in value if isinstance(value, list | tuple) else (value,):
                if not isinstance(inner, nn.Module | type):
                    yield from _policies_in(inner, depth - 1)
