"""A task's settings: the numbers of EnvConfig.kwargs laid over the task's defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from unirl.envs.config import EnvConfig
from unirl.errors import UniRLError


def read_settings(config: EnvConfig, defaults: Mapping[str, float]) -> dict[str, float]:
    """`defaults` with config.kwargs in their place; UniRLError for a name that is not among them,
    and for a value that is no number."""
    for name, value in config.kwargs.items():
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            raise UniRLError(
                f'env "{config.id}" has no setting "{name}"',
                f"env.kwargs may hold {', '.join(sorted(defaults)) or 'nothing'}",
                f'did you mean "{close[0]}"?' if close else "leave it out",
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UniRLError(
                f'setting "{name}" of env "{config.id}" is {value!r}',
                "it must be a number",
                f"its default is {defaults[name]}",
            )
    return {**defaults, **{name: float(value) for name, value in config.kwargs.items()}}
