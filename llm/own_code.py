"""Functions of the user's own, named `module:attribute`."""

from __future__ import annotations

from typing import Any

from unirl.config.spelling import suggestion
from unirl.errors import UniRLError
from unirl.imports import import_named


def is_own(name: str) -> bool:
    module, colon, attribute = name.partition(":")
    return bool(colon) and _is_dotted(module) and _is_dotted(attribute)


def load_own(name: str, what: str) -> Any:
    """What `module:attribute` names; UniRLError when there is no such thing.

    what: how messages call it, such as 'reward "my.code:score"'.
    """
    module_name, _, path = name.partition(":")
    found: Any = import_named(module_name, what)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise UniRLError(
                f"{what} does not exist",
                f'"{module_name}" has no attribute "{attribute}"',
                suggestion(attribute, dir(found)) or f"define it in {module_name}",
            )
        found = getattr(found, attribute)
    return found


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
