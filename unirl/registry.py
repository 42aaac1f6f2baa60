"""Names of recipes and where they live: strings, so naming one imports nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from unirl.errors import UniRLError
from unirl.imports import import_named

RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "impala": "unirl.recipes.impala",
        "appo": "unirl.recipes.appo",
        "ppo": "unirl.recipes.ppo",
        "ondevice": "unirl.recipes.ondevice",
        "grpo": "unirl.recipes.grpo",
        "agent": "unirl.recipes.agent",
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
    module = import_named(RECIPES.get(name, name), f'recipe "{name}"')
    missing = [part for part in ("Config", "plan") if not hasattr(module, part)]
    if missing:
        raise UniRLError(
            f'module "{module.__name__}" is not a recipe',
            f"a recipe has Config and plan(config); it lacks {' and '.join(missing)}",
            "define them as in unirl/recipes/impala.py",
        )
    return module
