"""Names of recipes and where they live: strings, so naming one imports nothing."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from unirl.errors import UniRLError

RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "impala": "unirl.recipes.impala",
        "appo": "unirl.recipes.appo",
        "ppo": "unirl.recipes.ppo",
        "ondevice": "unirl.recipes.ondevice",
        "grpo": "unirl.recipes.grpo",
    }
)
"""Recipes by their name on the command line: modules with `Config` and `plan(config)`."""


def recipe(name: str) -> ModuleType:
    """Import a recipe: one of RECIPES, or your own module by its dotted path; else UniRLError."""
    if name not in RECIPES and "." not in name:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        raise UniRLError(
            f'recipe "{name}" is unknown',
            f"there are {', '.join(sorted(RECIPES))}, and modules of your own by their dotted path",
            f'did you mean "{near[0]}"?' if near else "see them all: unirl list recipes",
        )
    module = _import(RECIPES.get(name, name), f'recipe "{name}"')
    missing = [part for part in ("Config", "plan") if not hasattr(module, part)]
    if missing:
        raise UniRLError(
            f'module "{module.__name__}" is not a recipe',
            f"a recipe has Config and plan(config); it lacks {' and '.join(missing)}",
            "define them as in unirl/recipes/impala.py",
        )
    return module


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself is named wrongly here: what it imports in turn is another error.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise UniRLError(
            f"{what} cannot be imported",
            f'there is no module "{error.name}" on the import path',
            "check the spelling, and that its folder is installed or on PYTHONPATH",
        ) from None
