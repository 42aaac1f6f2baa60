"""How a run is executed and how long it lasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unirl.config.rules import check_at_least, check_positive
from unirl.core.schedule import check_own
from unirl.core.training_budget import TrainingBudget
from unirl.errors import UniRLError, suggestion
from unirl.imports import is_own

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "clearml")
"""What run.track may name."""


@dataclass(frozen=True)
class RunnerConfig:
    """Where the pieces of a plan run."""

    kind: Literal["inline", "processes", "ray"] = field(default="inline", metadata={"common": True})
    """inline: one process, turn by turn, reproducible bit for bit. processes: every actor is a
    process of its own. ray: so are they, on the machines of a Ray cluster.
    """
    actor_threads: int = 1
    """Torch threads of each actor process. More than cores / actors makes everything slower,
    abruptly.
    """
    learner_threads: int = 0
    """Torch threads of the learner; from images each learns a share of every minibatch. 0: torch's
    choice when inline, one when actors run beside it.
    """
    actor_niceness: int = 10
    """Processes only: how much actors, environment workers and what they start give way to the
    learner, as `nice` counts: 0 to 19. More: the learner is interrupted less where processes
    outnumber cores, and other programs of the session come before the actors.
    """
    max_restarts: int = 3
    """How often one actor may die within `restart_window_seconds` before the run stops."""
    restart_window_seconds: float = 600.0
    """Restarts longer ago than this do not count against `max_restarts`."""
    hang_seconds: float = 120.0
    """An actor process that gives no sign of life for this long, though it holds slots or was
    stopped, is killed and restarted; a single sample of many in flight that makes no progress for
    as long is discarded.
    """
    scale_seconds: float = 10.0
    """Where a pool may have between so many and so many members: how long it is looked at who waits
    before that is a vote for more or for fewer. More: later, and surer.
    """

    def __post_init__(self) -> None:
        check_at_least(1, "runner", self, "actor_threads")
        check_at_least(0, "runner", self, "learner_threads", "max_restarts")
        if not 0 <= self.actor_niceness <= 19:
            raise UniRLError(
                f"runner.actor_niceness is {self.actor_niceness}",
                "0 <= runner.actor_niceness <= 19 must hold",
                "0 gives way to nobody, 10 is the default",
            )
        for name in ("hang_seconds", "restart_window_seconds", "scale_seconds"):
            check_positive(f"runner.{name}", getattr(self, name), "set it to 300, say")

    @property
    def is_inline(self) -> bool:
        """Whether everything runs in one process."""
        return self.kind == "inline"


@dataclass(frozen=True)
class RunConfig:
    """How long a run lasts and what it writes on the way."""

    seed: int = field(default=1, metadata={"common": True})
    """Everything random is derived from it. Another seed is another run."""
    total_steps: int = field(default=1_000_000, metadata={"common": True})
    """Samples to learn from (environment steps without filler rows, or completions) before the run
    ends.
    """
    pause_steps: int | None = None
    """End the run after so many samples, before `total_steps`, which schedules continue to fall
    towards. A resumed run goes further: run.pause_steps none, or a larger one.
    """
    log_seconds: float = 2.0
    """Seconds between two rows of metrics.jsonl, trackers and the console."""
    track: tuple[str, ...] = ("tensorboard",)
    """Trackers that get the rows of metrics.jsonl besides it: tensorboard, wandb, mlflow, trackio,
    clearml. Each but tensorboard is an extra and runs in a process of its own; where it sends to,
    and as whom, its own variables and files say.
    """
    track_project: str = ""
    """What trackers keep the run under. Empty: what their own variable says (WANDB_PROJECT,
    MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT, CLEARML_PROJECT), or else unirl.
    """
    checkpoint_steps: int = 1_000_000
    """Steps between two checkpoints; one more is written at the end. Inline runs restart their
    environments at each.
    """
    keep_checkpoints: int = 3
    """Older checkpoints are deleted."""
    eval_steps: int = field(default=0, metadata={"common": True})
    """Steps between two evaluations. 0: never while training."""
    eval_episodes: int = 20
    """Episodes of one evaluation. More: a smaller error of the mean, more time."""
    eval_deterministic: bool = False
    """Take the most probable action in evaluations instead of sampling."""
    target_return: float | None = None
    """Stop as soon as the mean training return of the last `target_window` episodes reaches this.
    """
    target_window: int = 100
    """Episodes that the mean for `target_return` and `charts/episodic_return` is taken over."""
    max_seconds: float | None = field(default=None, metadata={"common": True})
    """Stop after this much training time."""
    anneal_over: Literal["steps", "seconds"] = "steps"
    """What schedules follow. steps: total_steps. seconds: max_seconds as well, whichever
    is nearer its end: the same time gives a finished run on every machine, and no run repeats
    another.
    """
    anneal_from: float = 0.0
    """The share of the run that is over when linear and cosine schedules begin to fall. More:
    larger steps for longer, then a steeper end.
    """
    max_run_restarts: int = 3
    """How often a run starts again from its checkpoint by itself when what it stands on was lost: a
    cluster's head, a shard of the learner, or nodes and ranks beyond what restarts make good.
    0: never.
    """
    callbacks: tuple[str, ...] = ()
    """Functions, module:function, and objects, module:Class, that are called after every update and
    at the end (unirl.launch.callbacks); the first that raises ends the run with a checkpoint.
    """
    alerts: tuple[str, ...] = field(default=(), metadata={"secret": True})
    """Who is sent a message when a process died, was started again, when the run gave up or ended,
    or when the reward fell: Apprise URLs, or env:NAME for the variable that holds one. They are
    secrets, and no file of the run holds them.
    """
    alert_reward_drop: float = 0.5
    """How far the reward has to fall for that: this share of what it had gained. 0: never."""
    alert_window_seconds: float = 300.0
    """Time that the reward is averaged over before it is compared. More: later, and surer."""

    def __post_init__(self) -> None:
        check_at_least(1, "run", self, "total_steps", "checkpoint_steps", "keep_checkpoints")
        check_at_least(1, "run", self, "eval_episodes", "target_window")
        check_at_least(0, "run", self, "seed", "eval_steps", "log_seconds", "max_run_restarts")
        check_positive("run.max_seconds", self.max_seconds, "leave it out for no limit")
        for index, name in enumerate(self.track):
            if name not in TRACKERS or name in self.track[:index]:
                raise UniRLError(
                    f"run.track names {name!r}",
                    f"each of {', '.join(TRACKERS)} may be named once",
                    suggestion(name, TRACKERS) or "leave it out for tensorboard alone",
                )
        check_positive("run.pause_steps", self.pause_steps, "leave it out to train to the end")
        if self.anneal_over == "seconds" and self.max_seconds is None:
            raise UniRLError(
                "run.anneal_over is seconds and run.max_seconds is not set",
                "schedules over seconds need to know how many there are",
                "set run.max_seconds, or leave run.anneal_over out",
            )
        if not 0 <= self.anneal_from < 1:
            raise UniRLError(
                f"run.anneal_from is {self.anneal_from}",
                "it is a share of the run and must lie in [0, 1)",
                "leave it out to fall from the start, or set it to 0.6, say",
            )
        if not 0 <= self.alert_reward_drop <= 1 or self.alert_window_seconds <= 0:
            raise UniRLError(
                f"run.alert_reward_drop is {self.alert_reward_drop} over "
                f"{self.alert_window_seconds:g} s",
                "it is a share and must lie in [0, 1], and the window must be > 0 s",
                "leave both out for half of the gain over 300 s",
            )

    def check_schedules(self, schedules: Mapping[str, str]) -> None:
        """Raise UniRLError where it is said how schedules fall and none of these does, and for own
        ones that give no factor. schedules: names by their keys.
        """
        found = set(schedules.values())
        falls = bool(found & {"linear", "cosine"})
        for name, usual, has_effect in (
            ("anneal_over", "steps", falls or any(map(is_own, found))),
            ("anneal_from", 0.0, falls),  # a function of one's own says by itself when it falls
        ):
            value = getattr(self, name)
            if value != usual and not has_effect:
                raise UniRLError(
                    f"run.{name} is {value} and has no effect",
                    f"a schedule of the learner must be linear or cosine: {', '.join(found)}",
                    f"set learner.optimizer.lr_schedule to linear, or leave run.{name} out",
                )
        check_own(schedules)

    @property
    def budget(self) -> TrainingBudget:
        """What schedules end at."""
        by_clock = self.anneal_over == "seconds"
        max_seconds = self.max_seconds if by_clock else None
        return TrainingBudget(self.total_steps, max_seconds, self.anneal_from)


@dataclass(frozen=True)
class RayConfig:
    """Which machines runner ray uses."""

    address: str = ""
    """Of the cluster's head, such as 10.0.0.1:6379, or auto for the one that this machine belongs
    to. Empty: a cluster on this machine alone, which ends with the run.
    """
    wait_seconds: float = 60.0
    """How long to wait for the cluster, for nodes with what the plan asks for, and for an answer of
    a head that still accepts connections.
    """
    silent_seconds: float = 5.0
    """A node that gives no sign of life for this long is lost: what it held is discarded or issued
    again, and what it sends later is refused. More: a node may pause for longer.
    """
    working_dir: str = ""
    """A folder with code and data of the user's that nodes lack: each gets a copy as its working
    directory. Empty: the modules that were imported here and are not installed, where a node lacks
    them.
    """
    rank_cpus: float = 0.0
    """What each further rank of a learner (learner.ranks) asks for, to be placed on the cluster's
    nodes, as few of them as have it. This and rank_gpus 0: they are processes of the run's node.
    """
    rank_gpus: float = 0.0
    """As rank_cpus. 1: a rank for each GPU of the cluster."""
    max_node_failures: int = 3
    """A node that failed so often within runner.restart_window_seconds is left out."""
    weights_fanout: int = 2
    """How many nodes get new weights of 8 MB and more from the learner's machine; each node passes
    them on to as many others while they come. More: fewer steps to the last node, and more for each
    network to carry. 0: the learner's machine sends them to all.
    """

    def __post_init__(self) -> None:
        for name in ("wait_seconds", "silent_seconds"):
            check_positive(f"ray.{name}", getattr(self, name), "leave it out for the default")
        check_at_least(1, "ray", self, "max_node_failures")
        check_at_least(0, "ray", self, "rank_cpus", "rank_gpus")
        check_at_least(0, "ray", self, "weights_fanout")
