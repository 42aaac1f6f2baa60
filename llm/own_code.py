"""Functions of the user's own, named `module:attribute`; source: none."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from unirl.errors import UniRLError


def is_own(name: str) -> bool:
    """Whether a name has the form module:attribute."""
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
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            raise UniRLError(
                f"{what} does not exist",
                f'"{module_name}" has no attribute "{part}"',
                f'did you mean "{near[0]}"?' if near else f"define it in {module_name}",
            )
        found = getattr(found, part)
    return found


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
