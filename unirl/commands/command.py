"""One subcommand: how it is called, what it does, its flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NoOptions:
    """A command without flags."""


@dataclass(frozen=True)
class Command:
    """One line of `unirl --help`, and what is behind it."""

    usage: str
    """What follows the command's name."""
    summary: str
    """One sentence."""
    run: Callable[[Sequence[str]], int]
    """From the words behind the name to the exit code."""
    options: type = NoOptions
    """The config class of its flags."""
    outlives_console: bool = False
    """Whether it continues when nothing reads what it prints."""
