"""A task's settings: EnvConfig.kwargs laid over the task's defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from unirl.envs.config import EnvConfig
from unirl.errors import UniRLError


def read_settings(config: EnvConfig, defaults: Mapping[str, Any], remedy: str) -> dict[str, Any]:
    """`defaults` overridden by config.kwargs; UniRLError for a name that is not among them, with
    `remedy` where no name is near."""
    for name in config.kwargs:
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            raise UniRLError(
                f'env "{config.id}" has no setting "{name}"',
                f"env.kwargs may hold {', '.join(sorted(defaults)) or 'nothing'}",
                f'did you mean "{close[0]}"?' if close else remedy,
            )
    return {**defaults, **config.kwargs}


def read_numbers(config: EnvConfig, defaults: Mapping[str, float]) -> dict[str, float]:
    """`read_settings`; UniRLError for a value that is no number too."""
    settings = read_settings(config, defaults, "leave it out")
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UniRLError(
                f'setting "{name}" of env "{config.id}" is {value!r}',
                "it must be a number",
                f"its default is {defaults[name]}",
            )
    return {name: float(value) for name, value in settings.items()}
