"""Arguments of a command: its own flags apart from a recipe's, and the run it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from unirl import config as configs
from unirl.errors import UniRLError

T = TypeVar("T")


def parse(
    arguments: Sequence[str],
    options: type[T],
    short: Mapping[str, str] | None = None,
    alone: Mapping[str, str] | None = None,
) -> tuple[list[str], T]:
    """Positional arguments and flags of a command that has no recipe's flags besides its own."""
    positional, flags = configs.parse_flags(arguments, options, short=short, alone=alone)
    return positional, configs.from_mapping(options, flags)


def split(flags: Mapping[str, Any], options: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """A command's own flags, and those of the recipe."""
    own = {item.key for item in configs.fields_help(options)}
    return (
        {key: value for key, value in flags.items() if key in own},
        {key: value for key, value in flags.items() if key not in own},
    )


def parse_with_recipe(
    arguments: Sequence[str], options: type[T], recipe: type
) -> tuple[list[str], T, dict[str, Any]]:
    """Positional arguments, the command's own options, and the recipe's flags by dotted key."""
    positional, flags = configs.parse_flags(arguments, options, recipe)
    own, changes = split(flags, options)
    return positional, configs.from_mapping(options, own), changes


def first(arguments: Sequence[str], command: str) -> str:
    """The run of a command whose flags cannot be understood before it is read."""
    if not arguments or arguments[0].startswith("-"):
        raise missing_run(command)
    return arguments[0]


def one_run(positional: Sequence[str], command: str) -> str:
    """The run of a command that takes one."""
    if not positional:
        raise missing_run(command)
    if len(positional) > 1:
        raise UniRLError(
            f'"{positional[1]}" is one argument too many',
            f"unirl {command} takes one run",
            f"call it once per run, or see unirl {command} --help",
        )
    return positional[0]


def missing_run(command: str) -> UniRLError:
    return UniRLError(
        "no run was given",
        f"unirl {command} takes a run folder first",
        f"try unirl {command} runs/NAME",
    )
