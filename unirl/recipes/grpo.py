"""GRPO and its family: a language model answers prompts in groups and learns from their rewards.

    task -> rollout (engine, rewards) -> slots of one group -> queue -> learner -> weights -> engine

Shao et al., arXiv 2402.03300; what is in force is `algorithm` (see unirl algorithms).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from unirl.core.actor import AnyActor
from unirl.core.evaluator import Evaluator
from unirl.core.learner import Learner
from unirl.core.ledger import TicketLedger
from unirl.core.pool import Pool, Resources
from unirl.core.queue import REASONS
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.llm import assembly, generating, saved_samples
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.rollout import REASONS as AGENT_REASONS
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.engine import EngineConfig, SamplingConfig
from unirl.llm.evaluation_link import EvaluationLink
from unirl.llm.group import common_shape
from unirl.llm.learner_config import CriticConfig, LlmLearnerConfig
from unirl.llm.models.model import ModelConfig
from unirl.llm.replay import producer, stored_groups
from unirl.llm.replay.leases import make_leases
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rollout import REASONS as GROUP_REASONS
from unirl.llm.rollout import RolloutConfig
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.training.distill import TeacherConfig
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.run_ledger import make_ledger
from unirl.recipes.mix import check_mix, pool_name
from unirl.recipes.modes import Mode, ModeQueue, ModeRunner, queue_of, runner_of
from unirl.runners.config import RayConfig, RunConfig, RunnerConfig
from unirl.runners.plan import LearnerPlan, Plan

IMPORTS_LATE = True
"""What its processes need is not imported with the recipe: their fork server loads it for all."""


@dataclass(frozen=True)
class Config:
    """Everything that can be set for a run with a language model."""

    NICKNAMES: ClassVar[Mapping[str, str]] = {
        "model": "model.path",
        "task": "task.name",
        "engine": "engine.kind",
        "algorithm": "algorithm.preset",
        "teacher": "teacher.path",
    }

    mode: Mode = field(default="sync", metadata={"common": True})
    """sync: engine and learner take turns. colocated: and the engine gives its memory back
    meanwhile. partial: they take turns too, but more groups are begun than a batch has; a batch is
    what is finished first, and the rest is interrupted and continued later. one-step-off: a
    batch is generated while the one before is learned from. async: generation never pauses.
    In partial and async, completions are at most queue.max_staleness updates old.
    """
    only: Literal["rollout", "train"] | None = None
    """rollout: nothing is learned, all groups are written to samples/groups of the run folder; an
    agent's episodes to its store. train: nothing is generated, the groups in `samples` are learned
    from, again and again; an agent's each once (reuse_samples).
    """
    samples: str = ""
    """only = train: a run that was made with only = rollout, or the folder of its groups; of
    agents any run with stored episodes.
    """
    mix: Mapping[str, float] = field(default_factory=dict)
    """Several tasks, by name with their shares of what is learned: each has engines of its own, and
    task.name is the one that is evaluated. Empty: task.name alone.
    """
    num_engines: int = 1
    """Engines of each task, each in a process of its own where the mode overlaps. More: groups are
    generated faster, where there are devices or cores for them.
    """
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    learner: LlmLearnerConfig = field(default_factory=LlmLearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    queue: ModeQueue = field(
        default_factory=lambda: ModeQueue(batch_size=8, window=None, timeout_seconds=600.0)
    )
    runner: ModeRunner = field(default_factory=lambda: ModeRunner(hang_seconds=600.0))
    ray: RayConfig = field(default_factory=RayConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            total_steps=100_000, checkpoint_steps=10_000, eval_episodes=200, log_seconds=5.0
        )
    )

    @property
    def max_staleness(self) -> int:
        """What the mode makes of queue.max_staleness."""
        return queue_of(self.mode, self.queue).max_staleness

    @property
    def max_tokens(self) -> int:
        """Of a completion."""
        return self.sampling.max_tokens

    @property
    def agent_config(self) -> AgentConfig | None:
        """Completions have none."""
        return None

    @property
    def store_config(self) -> StoreConfig | None:
        """Of episodes."""
        return None

    @property
    def reuses_samples(self) -> bool:
        """Files know nothing of who learned from them."""
        return True

    def __post_init__(self) -> None:
        queue_of(self.mode, self.queue)
        runner_of(self.mode, self.runner)
        if (self.only == "train") != bool(self.samples):
            raise UniRLError(
                f'only is {self.only or "not set"}, samples is "{self.samples}"',
                "groups are read from files where only = train, and nowhere else",
                "--only train --samples runs/NAME, or neither",
            )
        if self.num_engines < 1:
            raise UniRLError(
                f"num_engines is {self.num_engines}", "num_engines >= 1 must hold", "set it to 1"
            )
        if self.mix and self.only:
            raise UniRLError(
                f"only is {self.only}, and mix has {', '.join(self.mix)}",
                "groups are written or read of one task at a time",
                "leave mix out",
            )
        if self.sampling.temperature == 0:
            raise UniRLError(
                "sampling.temperature is 0",
                "it must be > 0 in training: equal answers teach nothing",
                "1 is usual; run.eval_deterministic evaluates with the likeliest tokens",
            )


def plan(config: Config) -> Plan:
    """Load tokenizer and prompts to find what cannot work, and bind the pieces; nothing is
    started.
    """
    return plan_of("grpo", config)


def plan_of(recipe: str, config: Config) -> Plan:
    """The plan of a recipe whose config is of this kind."""
    model, teacher, dtype = assembly.settle_dtypes(config)
    config = replace(config, model=model, teacher=teacher)
    sources = {
        name: replace(config, task=replace(config.task, name=name), mix={})
        for name in check_mix(config.mix, config.task.name, "task.name")
    }
    run, runner = config.run, runner_of(config.mode, config.runner)
    make_learner: Callable[..., Learner] = partial(assembly.make_learner, config=config)
    make_evaluator: Callable[[int], Evaluator]
    make_actors: dict[str, Callable[..., AnyActor]]
    make_marks = _make_ledger(config)
    if config.only == "train" and config.store_config is not None:
        found = stored_groups.find_facts(config, config.samples)
        make_actors = {
            config.task.name: partial(
                producer.make_replay,
                config=config,
                samples=config.samples,
                shape=found.shape,
                reuse=config.reuses_samples,
            )
        }
        make_evaluator = partial(generating.make_evaluator, config=config, index=found.prompts)
        _require_one_process("train from a store")
    elif config.only == "train":
        found = saved_samples.probe(config, config.samples)
        make_actors = {
            config.task.name: partial(
                saved_samples.make_replay, config=config, samples=config.samples
            )
        }
        make_evaluator = partial(
            saved_samples.make_evaluator,
            config=config,
            task=found.fingerprint["task"],
            index=found.prompts,
        )
    else:
        facts = {name: assembly.probe(each) for name, each in sources.items()}
        shape = common_shape([each.shape for each in facts.values()])
        found = replace(next(iter(facts.values())), shape=shape)
        link = _link(config, runner)
        make_actors = {
            name: partial(
                generating.make_rollout,
                config=each,
                index=facts[name].prompts,
                link=link if name == config.task.name else None,
                saves=not runner.is_inline,
                share=config.mix.get(name, 1.0)
                / (sum(config.mix.values()) or 1.0)
                / config.num_engines,
            )
            for name, each in sources.items()
        }
        make_learner = partial(assembly.make_learner, config=config, link=link)
        make_evaluator = partial(
            generating.make_evaluator,
            config=sources[config.task.name],
            index=facts[config.task.name].prompts,
            link=link,
        )
    if config.only == "rollout":
        _require_one_process("rollout")
        make_learner = partial(saved_samples.make_saver, config=config)
        # A goal for learning and a schedule of it, and nothing is learned.
        run = replace(run, target_return=None, anneal_over="steps", anneal_from=0.0)
    # Two seconds that an actor's start and every restart would take longer.
    preload = ("transformers.modeling_utils",) if config.engine.kind == "hf" else ()
    pools = tuple(
        Pool(
            make_actor,
            pool_name(name, len(sources)),
            config.num_engines,
            config.mix.get(name, 1.0),
            resources=Resources(beside_learner=config.mode == "colocated"),
            preload=preload,
            keeps=config.store_config is not None,
        )
        for name, make_actor in make_actors.items()
    )
    own = GROUP_REASONS if config.agent_config is None else AGENT_REASONS
    return Plan(
        recipe,
        pools=pools,
        learners=(
            LearnerPlan(
                make_learner,
                found.shape.spec(),
                queue_of(config.mode, config.queue),
                make_evaluator=make_evaluator,
                weights_of=partial(assembly.weights_of, config=config),
                fingerprint={**found.fingerprint, **({"only": config.only} if config.only else {})},
                reasons=tuple(dict.fromkeys((*REASONS, *own))),
                ranks=config.learner.ranks if config.only != "rollout" else 1,
                reissue=True,
                make_ledger=make_marks,
            ),
        ),
        config=config,
        runner=runner,
        ray=config.ray,
        run=run,
        notes=(*found.notes, dtype),
    )


def _link(config: Config, runner: RunnerConfig) -> EvaluationLink | None:
    """Where loading the model once more would be slow: engine hf, which starts at once and computes
    as the learner does, is none of these.
    """
    if config.engine.kind == "hf" or runner.kind == "ray":  # its sockets are of one machine
        return None
    return EvaluationLink(
        config.num_engines,
        apart=not runner.is_inline,
        seconds=config.engine.timeout_seconds,
    )


def _make_ledger(config: Config) -> Callable[[Path], TicketLedger | None] | None:
    """What the tickets are marked in that are learned from."""
    store = config.store_config
    if store is None or config.only == "rollout":
        return None
    if config.only is None:
        return partial(make_ledger, config=store)
    if config.reuses_samples:
        return None
    size = config.queue.batch_size
    return partial(make_leases, samples=config.samples, config=store, batch_size=size)


def _require_one_process(what: str) -> None:
    """Raise UniRLError under torchrun, whose processes learn together, each from samples of its
    own.
    """
    ranks = Ranks.from_environment()
    if ranks.world_size > 1:
        raise UniRLError(
            f"only = {what} was started in {ranks.world_size} processes of torchrun",
            "one process alone writes the groups of a run folder, where nothing is learned, or "
            "reads those of a store",
            "start it once, without torchrun; several runs want names and seeds of their own, and "
            "learner.ranks learn together",
        )
