"""A Plan says what runs, how many, and where. It is picklable and nothing of it has started; a
runner executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unirl.core.actor import ActorContext, AnyActor
from unirl.core.env_workers import EnvWorkers
from unirl.core.evaluator import Evaluator
from unirl.core.learner import Learner, LearnerContext
from unirl.core.queue import QueueConfig
from unirl.core.sample import SampleSpec
from unirl.core.seeding import derive_seed
from unirl.core.slot_table import REASONS
from unirl.core.training_budget import TrainingBudget
from unirl.core.tree import flatten
from unirl.core.weights import Weights
from unirl.errors import UniRLError


@dataclass(frozen=True)
class RunnerConfig:
    """Where the pieces of a plan run."""

    kind: Literal["inline", "processes"] = "inline"
    """inline: one process, turn by turn, reproducible bit for bit. processes: every actor is a
    process of its own.
    """
    actor_threads: int = 1
    """Torch threads of each actor process. More than cores / actors makes everything slower,
    abruptly.
    """
    learner_threads: int = 0
    """Torch threads of the learner. 0: torch's choice when inline, one when actors run beside it.
    """
    actor_niceness: int = 10
    """Processes only: how much actors, environment workers and what they start give way to the
    learner, as `nice` counts: 0 to 19. More: the learner is interrupted less where processes
    outnumber cores, and other programs of the session come before the actors.
    """
    max_restarts: int = 3
    """How often one actor may die before the run stops."""
    hang_seconds: float = 120.0
    """An actor process that holds a slot the learner waits for this long is killed and restarted.
    """

    def __post_init__(self) -> None:
        for name, minimum in (("actor_threads", 1), ("learner_threads", 0), ("max_restarts", 0)):
            value = getattr(self, name)
            if value < minimum:
                raise UniRLError(
                    f"runner.{name} is {value}",
                    f"runner.{name} >= {minimum} must hold",
                    f"set it to {minimum} or more",
                )
        if not 0 <= self.actor_niceness <= 19:
            raise UniRLError(
                f"runner.actor_niceness is {self.actor_niceness}",
                "0 <= runner.actor_niceness <= 19 must hold",
                "0 gives way to nobody, 10 is the default",
            )
        if self.hang_seconds <= 0:
            raise UniRLError(
                f"runner.hang_seconds is {self.hang_seconds}",
                "a deadline must be > 0",
                "set it to 300, say",
            )


@dataclass(frozen=True)
class RunConfig:
    """How long a run lasts and what it writes on the way."""

    seed: int = 1
    """Everything random is derived from it. Another seed is another run."""
    total_steps: int = 1_000_000
    """Samples to learn from (environment steps without filler rows, or completions) before the run
    ends.
    """
    log_seconds: float = 2.0
    """Seconds between two rows of metrics.jsonl, TensorBoard and the console."""
    checkpoint_steps: int = 1_000_000
    """Steps between two checkpoints; one more is written at the end. Inline runs restart their
    environments at each.
    """
    keep_checkpoints: int = 3
    """Older checkpoints are deleted."""
    eval_steps: int = 0
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
    max_seconds: float | None = None
    """Stop after this much training time."""
    anneal_over: Literal["steps", "seconds"] = "steps"
    """What linear schedules fall over. steps: total_steps. seconds: max_seconds as well, whichever
    is nearer its end: the same time gives a finished run on every machine, and no run repeats
    another.
    """
    anneal_from: float = 0.0
    """The share of the run that is over when linear schedules begin to fall. More: larger steps for
    longer, then a steeper end.
    """

    def __post_init__(self) -> None:
        for name, minimum in (
            ("total_steps", 1), ("checkpoint_steps", 1), ("keep_checkpoints", 1), ("eval_steps", 0),
            ("eval_episodes", 1), ("target_window", 1), ("seed", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value < minimum:
                raise UniRLError(
                    f"run.{name} is {value}",
                    f"run.{name} >= {minimum} must hold",
                    f"set it to {minimum} or more",
                )
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise UniRLError(
                f"run.max_seconds is {self.max_seconds}",
                "it must be > 0",
                "leave it out for no limit",
            )
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
        if self.log_seconds < 0:
            raise UniRLError(
                f"run.log_seconds is {self.log_seconds}",
                "run.log_seconds >= 0 must hold",
                "set it to 2, say",
            )

    def check_anneals(self, *schedules: str) -> None:
        """Raise UniRLError where it is said how these schedules fall and none of them falls."""
        for name, usual in (("anneal_over", "steps"), ("anneal_from", 0.0)):
            value = getattr(self, name)
            if value != usual and "linear" not in schedules:
                raise UniRLError(
                    f"run.{name} is {value} and has no effect",
                    f"a schedule of the learner must be linear: {', '.join(schedules)}",
                    f"set learner.optimizer.lr_schedule to linear, or leave run.{name} out",
                )

    @property
    def budget(self) -> TrainingBudget:
        """What schedules end at."""
        by_clock = self.anneal_over == "seconds"
        max_seconds = self.max_seconds if by_clock else None
        return TrainingBudget(self.total_steps, max_seconds, self.anneal_from)


@dataclass(frozen=True)
class Plan:
    """All that a runner needs. The factories are module-level functions, classes or
    functools.partial of them.
    """

    recipe: str
    config: Any
    """The recipe's config, a dataclass, for config.toml; None where there is nothing to set."""
    spec: SampleSpec
    queue: QueueConfig
    num_actors: int
    make_actor: Callable[[ActorContext], AnyActor]
    """A StreamingActor in the processes runner only."""
    make_learner: Callable[[LearnerContext], Learner]
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    make_evaluator: Callable[[int], Evaluator] | None = None
    """From a seed; None: the recipe has no evaluation."""
    weights_of: Callable[[Mapping[str, Any]], Weights] | None = None
    """From the model of a checkpoint to what evaluators take; None: the same, flat."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint must agree on to be resumed: environment, spaces, policy. JSON."""
    env_workers: EnvWorkers | None = None
    """Processes that step the actors' environments. None: each actor steps its own, as all do in
    the inline runner.
    """
    other_policies: tuple[Plan, ...] = ()
    """Further policies that play in the same environments, each with a queue and a learner of its
    own: of these plans spec, queue, make_actor, make_learner and run count. num_actors is equal.
    """
    notes: tuple[str, ...] = ()
    """What people should know at the start besides what `describe` says: a line each."""
    reasons: tuple[str, ...] = REASONS
    """Reasons for which actors may discard slots."""
    reissue: bool = False
    """A ticket names something that must not be lost, such as a prompt: what a dead actor or a
    checkpoint left unfinished is issued again.
    """
    preload: tuple[str, ...] = ()
    """Modules of others that actors import late and that take long: loaded once for all actors and
    their restarts. Importing them must start no thread.
    """

    def __post_init__(self) -> None:
        if self.num_actors < 1:
            raise UniRLError(
                f"the plan has {self.num_actors} actors",
                "num_actors >= 1 must hold",
                "set actor.num_actors to 1",
            )
        if self.other_policies and self.runner.kind != "processes":
            raise UniRLError(
                f"{1 + len(self.other_policies)} policies learn in the {self.runner.kind} runner",
                "several policies need runner.kind processes",
                "set runner.kind to processes, or let one policy play all agents",
            )
        places = self.queue.num_slots
        needed = -(-self.num_actors // (self.queue.max_staleness + 1))
        if self.runner.kind == "processes" and self.num_actors > places:
            raise UniRLError(
                f"{self.num_actors} actors share {places} places",
                f"num_actors <= (max_staleness + 1) * batch_size = {places} must hold",
                f"set queue.batch_size to {needed}, or use fewer actors",
            )

    def make_learner_seeded(self, policy: int = 0) -> Learner:
        """The learner with the seed that this plan's run seed gives to this policy."""
        path = ("policy", policy) if policy else ()
        return self.make_learner(LearnerContext(derive_seed(self.run.seed, "learner", *path)))

    def weights_in(self, model: Mapping[str, Any]) -> Weights:
        """What evaluators take, of the model of a checkpoint."""
        return flatten(model) if self.weights_of is None else self.weights_of(model)

    def describe(self) -> str:
        """The plan in a few lines, for --dry-run and the log."""
        queue, spec = self.queue, self.spec
        window = "unbounded" if queue.window is None else queue.window
        sizes = (spec.num_bytes / 2**20, queue.num_slots * spec.num_bytes / 2**20)
        lines = [
            f"recipe    {self.recipe}",
            f"runner    {self.runner.kind}: {self.num_actors} actor(s) -> queue -> 1 learner",
            f"queue     {queue.num_slots} places = (max_staleness {queue.max_staleness} + 1) "
            f"x batch_size {queue.batch_size}, window {window}",
            f"slot      {sizes[0]:.2f} MiB, {sizes[1]:.1f} MiB in all",
        ]
        for name, item in spec.fields.items():
            shape = ", ".join(str(size) for size in item.shape)
            lines.append(f"          {name:<16} [{shape}] {str(item.dtype).removeprefix('torch.')}")
        lines += self.notes
        return "\n".join(lines)
