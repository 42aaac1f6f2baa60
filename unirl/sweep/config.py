"""What a sweep's file says besides the settings of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unirl.config.rules import check_at_least, check_positive, check_setting
from unirl.errors import UniRLError


@dataclass(frozen=True)
class ObjectiveConfig:
    """What makes a run better than another."""

    metric: str = "charts/episodic_return"
    """A number of metrics.jsonl. eval/return_mean needs run.eval_steps; step is how far the run
    got, for runs that end at run.target_return.
    """
    mode: Literal["max", "min"] = "max"
    """Whether more of it is better, or less."""
    window_steps: int = 0
    """The mean over the rows of the last so many steps. 0: the newest row that has it."""

    def __post_init__(self) -> None:
        check_at_least(0, "objective", self, "window_steps")
        check_setting(
            bool(self.metric), "objective.metric", '""', "must name a number", "leave it out"
        )


@dataclass(frozen=True)
class HalvingConfig:
    """Successive halving (arXiv 1810.05934): trials stop at rungs, the best of them continue."""

    first_steps: int | None = None
    """Steps of the first rung; each further one has `reduction` times as many, and the last is at
    run.total_steps. none: every trial is trained to its end.
    """
    reduction: int = 3
    """Of so many trials at a rung one continues. More: cheaper, and good ones that begin slowly are
    lost.
    """
    asynchronous: bool = False
    """A trial continues as soon as it is among the best of those that have come to its rung so far
    (ASHA, algorithm 2): nobody waits, more continue in error, and it depends on who comes first.
    Else that is decided when all have come (algorithm 1), and repeats.
    """

    def __post_init__(self) -> None:
        check_positive("halving.first_steps", self.first_steps, "leave it out for no rungs")
        check_at_least(2, "halving", self, "reduction")
        if self.asynchronous and self.first_steps is None:
            raise UniRLError(
                "halving.asynchronous is true, and halving.first_steps is not set",
                "without rungs there is nothing to decide",
                "write first_steps = 50_000, say, or leave asynchronous out",
            )

    def rungs(self, total_steps: int) -> tuple[int, ...]:
        """Steps at which trials are compared."""
        steps: list[int] = []
        rung = self.first_steps
        while rung is not None and rung < total_steps:
            steps.append(rung)
            rung *= self.reduction
        return (*steps, total_steps)


@dataclass(frozen=True)
class TrialResources:
    """What a run asks of its node, where a sweep is on Ray."""

    cpus: float | None = None
    """none: one for each of its processes that compute."""
    gpus: float = 0.0
    """A run sees the GPUs that Ray gave it, and no others."""
    memory_gib: float = 0.0

    def __post_init__(self) -> None:
        check_at_least(0, "resources", self, "cpus", "gpus", "memory_gib")


@dataclass(frozen=True)
class SweepConfig:
    """Trials of one config, each with other settings, each run once for every seed."""

    base: str = ""
    """The config that trials change: @cartpole, or a file beside this one. The file's own tables
    ([env], [run], ...) change it; without a base, `recipe` names the recipe that they belong to.
    """
    recipe: str = ""
    """The recipe, where the base does not name it."""
    name: str = ""
    """The sweep's folder under --runs-dir. Empty: the name of the file."""
    method: Literal["grid", "random", "optuna"] = "grid"
    """How values are chosen. grid: all combinations. random: drawn. optuna: by Optuna's TPE, which
    learns from the trials before.
    """
    trials: int | None = None
    """How many settings are tried. none: all of a grid; random and optuna need to know it."""
    seeds: tuple[int, ...] = (1,)
    """Each trial is run with each of these as run.seed, and judged by the mean. More: surer."""
    search_seed: int = 1
    """What is drawn follows from it."""
    jobs: int | None = None
    """How many runs train at a time. none: as many as this machine has cores for, or the nodes of a
    cluster room.
    """
    on: Literal["machine", "ray"] = "machine"
    """Where runs train: on this machine, or on the nodes of the Ray cluster at ray.address, all of
    which see the folder of the sweep. Without an address: a cluster of this machine alone.
    """
    resources: TrialResources = field(default_factory=TrialResources)
    max_lost: int = 3
    """How often a run may lose its node: it continues on another one, from its checkpoint."""
    max_seconds: float | None = None
    """No run starts after so many seconds of the sweep, and those that train are ended with a
    checkpoint; `unirl sweep` with a larger one continues.
    """
    space: Mapping[str, Any] = field(default_factory=dict)
    """What is tried, by key: choices, [a, b], or a range, { low, high, log, step }."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    halving: HalvingConfig = field(default_factory=HalvingConfig)

    def __post_init__(self) -> None:
        check_at_least(1, "sweep", self, "trials", "jobs")
        check_at_least(0, "sweep", self, "search_seed", "max_lost")
        check_positive("max_seconds", self.max_seconds, "leave it out for no limit")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UniRLError(
                f"seeds is {list(self.seeds)}",
                "there must be one or more, each >= 0 and each once",
                "write seeds = [1, 2, 3]",
            )
        if self.method != "grid" and self.trials is None:
            raise UniRLError(
                f"method is {self.method} and trials is not set",
                "only a grid has an end of its own",
                "write trials = 20, say",
            )


@dataclass(frozen=True)
class SweepOptions(SweepConfig):
    """Flags of `unirl sweep` besides the recipe's own: all of its file, and these."""

    runs_dir: Path = Path("runs")
    """Where run folders are: the sweep's is one of them, and holds those of its runs."""
    overwrite: bool = False
    """Delete a sweep of this name first."""
    dry_run: bool = False
    """Print the trials and what they cost, and start nothing."""
