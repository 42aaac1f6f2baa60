"""What a tracker does, and which there are.

A tracker lives in a process of its own (follower.py): its library may hang, crash or print what it
likes. Each gets the rows of metrics.jsonl in order, at least once.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from unirl.errors import UniRLError

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "clearml": "clearml"}
)
"""The module of each tracker that is a package of its own; extras bear the same names."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets to know of a run."""

    name: str
    project: str
    """Empty: the tracker's own variable, or else unirl."""
    folder: Path
    """Where files of the tracker may go."""
    seed: int
    config: Mapping[str, Any]
    """Tables of config.toml, which has no secrets."""
    id: str | None
    """What the tracker calls the run; None: it does not have it yet."""

    def flat_config(self, separator: str = ".") -> dict[str, Any]:
        """The config's values by their whole keys."""
        return dict(_flat(self.config, "", separator))


class Tracker(Protocol):
    """One tracker. May raise whatever its library raises."""

    settle_seconds: float
    """How long after `log` a row may be lost where the process is killed."""

    def check(self) -> None:
        """Raise UniRLError where it is known, without a network, that nothing can be sent."""

    def open(self, run: TrackedRun) -> str:
        """Begin, or continue the run of `run.id`; returns what the tracker calls it."""

    def log(self, step: int, seconds: float, scalars: Mapping[str, float]) -> None:
        """One row; `seconds` of training before it."""

    def close(self) -> None:
        """Return when everything has arrived."""


def make_tracker(name: str) -> Tracker:
    """The tracker of this name; its package is imported when it is used."""
    module = importlib.import_module(f"unirl.report.trackers.{name}")
    tracker: Tracker = module.make()
    return tracker


def require_installed(name: str) -> None:
    """Raise UniRLError where a tracker's package is missing."""
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UniRLError(
            f"run.track names {name}, which is not installed",
            f"package {package} is an extra of its own",
            f"pip install 'unirl[{name}]', or leave {name} out of run.track",
        )


def _flat(table: Mapping[str, Any], prefix: str, separator: str) -> Any:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}{separator}", separator)
        else:
            yield f"{prefix}{key}", value
