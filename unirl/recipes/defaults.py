"""Settings that neither flags nor a file give: a recipe may choose them by the environment's kind
and the machine's cores (decision 022). Flags win over files, files over these, and these over the
defaults of the config's classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from unirl import config as configs
from unirl.config.writing import value_to_toml
from unirl.host import usable_cores
from unirl.learners.parallel import Ranks
from unirl.recipes.env_kind import EnvKind, kind_of


@dataclass(frozen=True)
class Settled:
    """A recipe's config, and what it took from the environment's kind."""

    config: Any
    lines: tuple[str, ...] = ()
    """Which defaults it took and why, in words."""
    kind: EnvKind | None = None
    """None: nothing depends on it."""


class Choices:
    """What was set by hand, what is known, and what has been chosen so far."""

    def __init__(
        self,
        config: Any,
        given: frozenset[str],
        kind: EnvKind,
        num_cores: int,
        *,
        may_start_processes: bool = True,
    ) -> None:
        self.kind, self.num_cores = kind, num_cores
        self.may_start_processes = may_start_processes
        self.settings: dict[str, Any] = {}
        """What differs from the defaults of the classes, by dotted key."""
        self.reasons: list[tuple[dict[str, Any], str]] = []
        self._config, self._given = config, given

    def is_given(self, *keys: str) -> bool:
        """Whether any of these was set by hand."""
        return any(key in self._given for key in keys)

    def __getitem__(self, key: str) -> Any:
        """A setting as it stands."""
        if key in self.settings:
            return self.settings[key]
        value = self._config
        for name in key.split("."):
            value = getattr(value, name)
        return value

    def choose(self, why: str, settings: Mapping[str, Any]) -> None:
        """Set what was not set by hand; what already is like that needs no reason."""
        fresh = {
            key: value
            for key, value in settings.items()
            if key not in self._given and self[key] != value
        }
        if fresh:
            self.settings |= fresh
            self.reasons.append((fresh, why))


def settle(
    module: ModuleType, config: Any, table: Mapping[str, Any], num_cores: int | None = None
) -> Settled:
    """A recipe's config with what nobody set chosen for it.

    table: what files and flags set; config has it already. num_cores: None: of this machine.

    A recipe with a function `defaults(choices)` is asked for the rest. Raises UniRLError for
    an environment that cannot be made, and for values that break a rule.
    """
    ask = getattr(module, "defaults", None)
    if ask is None:
        return Settled(config)
    # Processes of torchrun must come to the same config, so nothing is timed there.
    alone = Ranks.from_environment().world_size == 1
    kind = kind_of(config.env, may_time=alone)
    given = frozenset(_keys(table))
    cores = num_cores or usable_cores()
    choices = Choices(config, given, kind, cores, may_start_processes=alone)
    ask(choices)
    config = configs.override(config, choices.settings)
    return Settled(config, tuple(_lines(choices)), kind)


def _lines(choices: Choices) -> Iterator[str]:
    if not choices.reasons:
        return
    kind, cores = choices.kind, choices.num_cores
    number = f"{cores} core" + "s" * (cores > 1)
    yield f"defaults  environment {kind.stepping} ({kind.why}), {number}:"
    for settings, why in choices.reasons:
        # What was chosen later counts.
        last = {key: value for key, value in settings.items() if choices[key] == value}
        if last:
            words = ", ".join(f"{key} {value_to_toml(value)}" for key, value in last.items())
            yield f"          {words}: {why}"


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
