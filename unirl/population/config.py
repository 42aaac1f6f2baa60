"""Settings of a population."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unirl.config.rules import check_at_least, check_setting
from unirl.errors import UniRLError


@dataclass(frozen=True)
class PopulationConfig:
    """Learners that train side by side, each with actors, weights and settings of its own. One that
    does badly continues with the weights of one that does well, and with settings near its.
    """

    size: int = 1
    """Learners. More: more settings are tried, and each takes as many samples as a run. 1: no
    population.
    """
    every_steps: int = 100_000
    """Steps of a learner from one comparison to the next. Less: bad settings are left sooner, and
    luck counts for more.
    """
    vary: Mapping[str, Any] = field(default_factory=dict)
    """The settings that differ, by key: choices, [a, b], or a range, { low, high, log, step }."""
    start: Literal["drawn", "config"] = "drawn"
    """What learners begin with: values drawn from `vary`, or all with those of the config."""
    quantile: float = 0.25
    """The share of learners that counts as the worst, and as the best."""
    resample: float = 0.25
    """How probable it is that a setting of one that copied is drawn from all of its range."""
    factors: tuple[float, ...] = (0.8, 1.2)
    """Else it is multiplied by one of these; of choices it becomes a neighbour."""
    episodes: int = 20
    """Episodes since it last copied that a learner needs to be compared, at most run.target_window.
    """

    def __post_init__(self) -> None:
        check_at_least(1, "population", self, "size", "every_steps", "episodes")
        check_setting(
            0 < self.quantile <= 0.5,
            "population.quantile",
            self.quantile,
            "must lie in (0, 0.5]",
            "0.25 is usual",
        )
        check_setting(
            0 <= self.resample <= 1,
            "population.resample",
            self.resample,
            "must lie in [0, 1]",
            "0.25 is usual",
        )
        check_setting(
            bool(self.factors) and min(self.factors) > 0,
            "population.factors",
            list(self.factors),
            "must be one or more numbers > 0",
            "[0.8, 1.2] is usual",
        )
        if (self.size > 1) != bool(self.vary):
            raise UniRLError(
                f"population.size is {self.size}, and population.vary has "
                f"{', '.join(self.vary) or 'nothing'}",
                "two or more learners vary one setting or more",
                "set both, or leave both out",
            )
