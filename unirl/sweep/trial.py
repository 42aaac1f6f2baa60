"""Trials and their runs: how far each has come, as `sweep.json` keeps it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["running", "stopped", "finished", "failed"]


@dataclass
class SeedRun:
    """One run of a trial."""

    seed: int
    values: list[float] = field(default_factory=list)
    """The objective at each rung that it has reached."""
    steps: int = 0
    """How far it was trained."""
    reason: str = ""
    """Why it failed."""
    lost: int = 0
    """How often the node that it was on was lost."""


@dataclass
class Trial:
    """Settings that are tried, and the runs that try them."""

    number: int
    settings: dict[str, Any]
    runs: list[SeedRun]
    rung: int = 0
    """The index of the rung that it is on its way to, or has stopped at."""
    status: Status = "running"
    reason: str = ""
    """Why it failed."""

    @property
    def name(self) -> str:
        return f"trial-{self.number:03d}"

    def due(self) -> list[SeedRun]:
        """Runs that have not reached the trial's rung."""
        if self.status != "running":
            return []
        return [run for run in self.runs if len(run.values) <= self.rung]

    def reached(self) -> int:
        """How many rungs all of its runs have reached."""
        return min(len(run.values) for run in self.runs)

    def mean(self, rung: int) -> float:
        """Of the objective at a rung, over seeds."""
        return statistics.fmean(run.values[rung] for run in self.runs)

    def std(self, rung: int) -> float:
        """Of the objective at a rung, over seeds; NaN of one seed."""
        values = [run.values[rung] for run in self.runs]
        return statistics.stdev(values) if len(values) > 1 else math.nan

    def fail(self, run: SeedRun, reason: str) -> None:
        """A trial one of whose runs failed has no value: the mean of the others says less."""
        run.reason = reason
        self.status, self.reason = "failed", f"seed {run.seed}: {reason}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Trial:
        return cls(**{**table, "runs": [SeedRun(**run) for run in table["runs"]]})
