"""Functions of the user's own, named `module:attribute`."""

from __future__ import annotations

import importlib
from typing import Any

from unirl.config.spelling import suggestion
from unirl.errors import UniRLError


def is_own(name: str) -> bool:
    module, colon, attribute = name.partition(":")
    return bool(colon) and _is_dotted(module) and _is_dotted(attribute)


def load_own(name: str, what: str) -> Any:
    """What `module:attribute` names; UniRLError when there is no such thing.

    what: how messages call it, such as 'reward "my.code:score"'.
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the module itself is named wrongly here: what it imports in turn is another error.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise UniRLError(
            f"{what} cannot be imported",
            f'there is no module "{error.name}" on the import path',
            "check the spelling, and that its folder is installed or on PYTHONPATH",
        ) from None
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
