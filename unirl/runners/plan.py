"""A Plan says what runs and how many. It is picklable and nothing of it has started; a runner
executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.config.rules import check_finite
from unirl.core.actor import AnyActor
from unirl.core.evaluator import Evaluator
from unirl.core.learner import Learner, LearnerContext
from unirl.core.ledger import TicketLedger
from unirl.core.pool import Pool, Resources
from unirl.core.queue import REASONS, QueueConfig
from unirl.core.sample import SampleSpec
from unirl.core.seeding import derive_seed
from unirl.core.tree import flatten
from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.runners.config import RayConfig, RunConfig, RunnerConfig

if TYPE_CHECKING:
    from unirl.runners.loop import Hook, TrainLoop


@dataclass(frozen=True)
class LearnerPlan:
    """One learner: what it consumes, and how it is made. The factories are module-level functions
    or classes, or functools.partial of them.
    """

    make: Callable[[LearnerContext], Learner]
    spec: SampleSpec
    """What a slot holds."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    name: str = "learner"
    make_evaluator: Callable[[int], Evaluator] | None = None
    """From a seed; None: the recipe has no evaluation."""
    weights_of: Callable[[Mapping[str, Any]], Weights] | None = None
    """From the model of a checkpoint to what evaluators take; None: the same, flat."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint must agree on to be resumed: environment, spaces, policy. JSON."""
    reasons: tuple[str, ...] = REASONS
    """Reasons for which actors may discard slots."""
    ranks: int = 1
    """Processes that learn together, each from its part of a batch; `make` takes `ranks` then."""
    reissue: bool = False
    """A ticket names something that must not be lost, such as a prompt: what a dead actor or a
    checkpoint left unfinished is issued again.
    """
    make_ledger: Callable[[Path], TicketLedger | None] | None = None
    """From the run's folder: what its tickets are marked in when they were learned from; None:
    nothing. Called in the learner's process.
    """

    def weights_in(self, model: Mapping[str, Any]) -> Weights:
        """What evaluators take, of the model of a checkpoint."""
        return flatten(model) if self.weights_of is None else self.weights_of(model)


@dataclass(frozen=True)
class Plan:
    """All that a runner needs.

    Plan("bandit", pools=[Pool(BanditActor)], learners=[LearnerPlan(GradientBandit, SPEC)])
    """

    recipe: str
    pools: tuple[Pool, ...]
    learners: tuple[LearnerPlan, ...]
    config: Any = None
    """The recipe's config, a dataclass, for config.toml; None where there is nothing to set."""
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    make_hooks: Callable[[Sequence[TrainLoop], Sequence[Path]], Sequence[Hook]] | None = None
    """From all loops, restored, and their folders to a hook of each: what its learners do with each
    other between their updates.
    """
    notes: tuple[str, ...] = ()
    """What people should know at the start besides what `describe` says: a line each."""

    def in_folder(self, folder: Path) -> Plan:
        """With this folder for the members that keep files of the run."""
        pools = [
            replace(pool, make_actor=partial(_factory(pool), folder=folder), keeps=False)
            if pool.keeps
            else pool
            for pool in self.pools
        ]
        return replace(self, pools=tuple(pools))

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", tuple(self.pools))
        object.__setattr__(self, "learners", tuple(self.learners))
        names = [learner.name for learner in self.learners]
        if not names or len(set(names)) < len(names):
            raise UniRLError(
                f"the plan has learners {names}",
                "there is at least one, and each has a name of its own",
                "name them apart",
            )
        for pool in self.pools:
            for name in pool.learners:
                if name not in names:
                    raise UniRLError(
                        f"pool {pool.name!r} feeds learner {name!r}",
                        f"the plan has {', '.join(names)}",
                        "name one of these",
                    )
        check_finite(self.run, "run.")
        check_finite(self.runner, "runner.")
        for learner in self.learners:
            check_finite(learner.queue, "queue.")
            self._check_slots(learner)

    def _check_slots(self, learner: LearnerPlan) -> None:
        """UniRLError unless a pool feeds it, and all of its actors can have a slot at once."""
        pools, capacity = self.pools_of(learner), learner.queue.num_slots
        if not pools:
            raise UniRLError(
                f"nothing feeds learner {learner.name!r}",
                "each learner needs a pool",
                "add a pool with this name in its learners",
            )
        batch, ranks = learner.queue.batch_size, learner.ranks
        if ranks > 1 and (batch % ranks or len(self.learners) > 1 or learner.spec.device != "cpu"):
            raise UniRLError(
                f"learner.ranks is {ranks}, of {len(self.learners)} learner(s) with batches of "
                f"{batch} slots on {learner.spec.device}",
                "each rank gets an equal part of a batch: queue.batch_size % learner.ranks == 0 "
                "must hold, for one learner, whose slots are on the CPU",
                f"set queue.batch_size to {-(-batch // ranks) * ranks}"
                if batch % ranks
                else "set learner.ranks to 1",
            )
        number = sum(pool.bounds[1] for pool in pools)
        if not self.runner.is_inline and number > capacity:
            needed = -(-number // (learner.queue.max_staleness + 1))
            raise UniRLError(
                f"{number} actors share {capacity} slots",
                f"actors <= (max_staleness + 1) * batch_size = {capacity} must hold",
                f"set queue.batch_size to {needed}, or use fewer actors",
            )

    @property
    def learner(self) -> LearnerPlan:
        """The first learner: the only one of most plans."""
        return self.learners[0]

    def with_learner(self, **changes: Any) -> Plan:
        """The plan with another first learner: plan.with_learner(make=MyLearner)."""
        return replace(self, learners=(replace(self.learner, **changes), *self.learners[1:]))

    def with_pool(self, **changes: Any) -> Plan:
        """The plan with another first pool: plan.with_pool(make_actor=MyActor, count=4)."""
        return replace(self, pools=(replace(self.pools[0], **changes), *self.pools[1:]))

    def learners_of(self, pool: Pool) -> list[int]:
        """Indices of the learners that a pool feeds."""
        names = [learner.name for learner in self.learners]
        return [names.index(name) for name in pool.learners] or [0]

    def pools_of(self, learner: LearnerPlan) -> list[Pool]:
        """The pools that feed a learner: their index here is the pool's number in its queue."""
        index = self.learners.index(learner)
        return [pool for pool in self.pools if index in self.learners_of(pool)]

    def learner_seed(self, index: int) -> int:
        """The seed that the run's seed gives to a learner."""
        path = ("policy", index) if index else ()
        return derive_seed(self.run.seed, "learner", *path)

    def describe(self) -> str:
        """The plan in a few lines, for --dry-run and the log."""
        lines = [f"recipe    {self.recipe}", f"runner    {self.runner.kind}"]
        shares = len(self.pools) > len(self.learners)
        for pool in self.pools:
            low, high = pool.bounds
            number = str(low) if low == high else f"{low} to {high}"
            line = f"pool      {number} {pool.name}(s)"
            if pool.helpers is not None:
                line += f" with {pool.helpers.count} {pool.helpers.role}(s)"
            line += f" -> {', '.join(self.learners[i].name for i in self.learners_of(pool))}"
            lines.append(line + (f", share {pool.share:g}" if shares else ""))
            if pool.resources != Resources() and self.runner.kind != "ray":
                lines.append("          its resources are ignored: there is one machine")
        for learner in self.learners:
            lines += _describe_queue(learner)
        return "\n".join([*lines, *self.notes])

    @property
    def rank_resources(self) -> Resources:
        """What each further rank of the learner asks of a cluster; nothing: it is on this node."""
        if self.runner.kind != "ray" or self.learner.ranks == 1:
            return Resources(cpus=0.0)
        return Resources(self.ray.rank_cpus, self.ray.rank_gpus)

    def outline(self) -> dict[str, Any]:
        """Pools and queues as JSON can hold them, for programs that show the pipeline."""
        return {
            "pools": [
                {
                    "name": pool.name,
                    "members": pool.bounds[0],
                    "most": pool.bounds[1],
                    "helpers": None
                    if pool.helpers is None
                    else {"role": pool.helpers.role, "count": pool.helpers.count},
                    "share": pool.share,
                    "learners": [self.learners[index].name for index in self.learners_of(pool)],
                }
                for pool in self.pools
            ],
            "queues": [
                {
                    "learner": learner.name,
                    "slots": learner.queue.num_slots,
                    "batch_size": learner.queue.batch_size,
                    "max_staleness": learner.queue.max_staleness,
                    "window": learner.queue.window,
                }
                for learner in self.learners
            ],
        }


def _describe_queue(learner: LearnerPlan) -> list[str]:
    queue, spec = learner.queue, learner.spec
    window = "unbounded" if queue.window is None else queue.window
    sizes = (spec.num_bytes / 2**20, queue.num_slots * spec.num_bytes / 2**20)
    lines = [
        f"queue     {queue.num_slots} slots = (max_staleness {queue.max_staleness} + 1) "
        f"x batch_size {queue.batch_size}, window {window} -> {learner.name}",
        f"slot      {sizes[0]:.2f} MiB, {sizes[1]:.1f} MiB in all",
    ]
    if learner.ranks > 1:
        lines.append(f"ranks     {learner.ranks} processes learn together")
    for name, item in spec.fields.items():
        shape = ", ".join(str(size) for size in item.shape)
        lines.append(f"          {name:<16} [{shape}] {str(item.dtype).removeprefix('torch.')}")
    return lines


def _factory(pool: Pool) -> Callable[..., AnyActor]:
    """Which takes more than a context."""
    return pool.make_actor
