"""Imports of what a setting names, a module or `module:attribute` of the user's own, and of what is
large: torch is half a million objects, transformers as many again.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from unirl.errors import UniRLError, suggestion


def import_named(name: str, what: str) -> ModuleType:
    """The module of this full name; UniRLError where there is none. What it raises itself is its
    own.

    what: how messages call it, such as 'reward "my.code:score"'.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself is named wrongly here: what it imports in turn is another error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UniRLError(
            f"{what} cannot be imported",
            f'there is no module "{error.name}" on the import path',
            "check the spelling, and that its folder is installed or on PYTHONPATH",
        ) from None


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


@contextmanager
def large_imports() -> Iterator[None]:
    """In this block the garbage collector rests. All that is imported stays, and going through it
    time and again as it grows takes a fifth of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_imported() -> None:
    """Let the collector leave out for good what is there now: neither the training nor a process
    that is forked goes through what was imported. For commands, which own their process.
    """
    gc.freeze()
