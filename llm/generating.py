"""What generates in a language recipe, made from its config in the process that needs it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unirl.core.actor import ActorContext
from unirl.core.weights import WeightStore
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.llm.agents.agent import Agent
from unirl.llm.agents.bridge import Bridge
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.gathering import Haste
from unirl.llm.agents.make import make_agent, make_bridge, session_maker
from unirl.llm.agents.rollout import AgentRollout
from unirl.llm.endpoint.server import Endpoint
from unirl.llm.engine import Engine
from unirl.llm.engines.make import make_engine
from unirl.llm.engines.vllm.memory import beside_learner
from unirl.llm.evaluate import LlmEvaluator, NoStore
from unirl.llm.evaluation_link import EvaluationLink
from unirl.llm.group import GroupShape
from unirl.llm.language_config import LanguageConfig
from unirl.llm.models.dtype import for_evaluation
from unirl.llm.models.lora import with_base
from unirl.llm.models.model import (
    TINY,
    ModelConfig,
    context_length,
    load_tokenizer,
    source_of,
)
from unirl.llm.models.transformers import import_transformers
from unirl.llm.models.vocabulary import vocabulary_digest
from unirl.llm.rewards.rewards import Rewarder
from unirl.llm.rollout import Rollout, Visitors
from unirl.llm.sandbox.box import SandboxCounts
from unirl.llm.tasks.make import make_tasks
from unirl.llm.tasks.prompts import PromptIndex, PromptSource
from unirl.llm.trajectories.keeper import make_keeper


def make_rollout(
    context: ActorContext,
    *,
    config: LanguageConfig,
    index: PromptIndex | None = None,
    link: EvaluationLink | None = None,
    saves: bool = False,
    share: float = 1.0,
    folder: Path | None = None,
) -> Rollout | AgentRollout:
    """The factory of a plan's actors. share: of all groups, that each makes. folder: of the run."""
    return _rollout(
        config,
        make_engine(beside_learner(config.engine, config.learner.device), config.model),
        context.weights,
        index,
        seed=config.run.seed,
        ranks=Ranks.from_environment(),
        max_staleness=config.max_staleness,
        sleeps=config.mode == "colocated",
        visitors=link.visitors(context.index) if link is not None else None,
        saves=saves,
        share=share,
        folder=folder,
    )


def make_evaluator(
    seed: int,
    *,
    config: LanguageConfig,
    index: PromptIndex | None = None,
    link: EvaluationLink | None = None,
) -> LlmEvaluator:
    """The factory of a plan's evaluator: the run's engines answer where there is a link to them,
    else the embedded engine, which starts at once.
    """

    def make() -> Rollout | AgentRollout:
        engine = replace(config.engine, kind="hf", url="", urls_file="")
        model = for_evaluation(config.model, engine.device)
        ranks = Ranks()
        return _rollout(
            config, make_engine(engine, model), NoStore(), index, seed=seed, ranks=ranks
        )

    whole = partial(with_base, config=config.model)
    return LlmEvaluator(seed, make=make, whole=whole, link=link)


def _rollout(
    config: LanguageConfig,
    engine: Engine,
    weights: WeightStore,
    index: PromptIndex | None,
    *,
    seed: int,
    ranks: Ranks,
    max_staleness: int = 0,
    sleeps: bool = False,
    visitors: Visitors | None = None,
    saves: bool = False,
    share: float = 1.0,
    folder: Path | None = None,
) -> Rollout | AgentRollout:
    boxes = SandboxCounts()
    agent = agent_of(config, boxes)
    prompts, rewarder = make_prompts(config, index, agent, boxes)
    if config.agent_config is None or agent is None:
        return Rollout(
            engine,
            weights,
            prompts,
            rewarder,
            config.rollout,
            config.sampling,
            seed=seed,
            ranks=ranks,
            max_staleness=max_staleness,
            sleeps=sleeps,
            visitors=visitors,
            saves=saves,
        )
    shape = GroupShape(
        config.rollout.group_size,
        prompts.longest,
        config.max_tokens,
        len(rewarder.names),
        config.agent_config.max_segments,
    )
    haste = None
    # Where nothing is learned from it all of a group is wanted.
    if config.mode == "async" and config.queue.window is None and config.only is None:
        haste = Haste(max_staleness, share * config.queue.batch_size)
    return AgentRollout(
        engine,
        weights,
        prompts,
        rewarder,
        config.rollout,
        config.sampling,
        config.agent_config,
        agent,
        session_maker(
            config.agent_config,
            _bridge(config, config.agent_config),
            config.engine.max_context or _own_context(config.model, load_tokenizer(config.model)),
        ),
        shape,
        seed=seed,
        ranks=ranks,
        haste=haste,
        sleeps=sleeps,
        visitors=visitors,
        boxes=boxes,
        keeper=make_keeper(
            config.store_config,
            folder,
            config.reward.weight_of,
            {
                "agent": _driver(config.agent_config),
                "env": config.agent_config.world,
                "engine": config.engine.kind,
                "tokenizer_digest": vocabulary_digest(load_tokenizer(config.model)),
            },
            waits=config.only == "rollout",
        ),
    )


def _driver(config: AgentConfig) -> str:
    return config.function or config.command or "native"


def agent_of(config: LanguageConfig, boxes: SandboxCounts | None = None) -> Agent | None:
    """What drives episodes; None where prompts are answered once."""
    if config.agent_config is None:
        return None
    return make_agent(config.agent_config, Endpoint, boxes)


def _bridge(config: LanguageConfig, agent: AgentConfig) -> Bridge:
    return make_bridge(agent, load_tokenizer(config.model), config.task.template_options)


def make_prompts(
    config: LanguageConfig,
    index: PromptIndex | None = None,
    agent: Agent | None = None,
    boxes: SandboxCounts | None = None,
) -> tuple[PromptSource, Rewarder]:
    """What is asked, and how it is judged. agent: what attempts it; its world may bring tasks."""
    tokenizer = load_tokenizer(config.model)
    brought = agent.task() if agent is not None else None
    tasks = [brought] if brought is not None else make_tasks(config.task)
    prepare = None
    if config.agent_config is not None and agent is not None:
        prepare = partial(_bridge(config, config.agent_config).prepared, tools=agent.schemas)
    prompts = PromptSource(
        tasks,
        tokenizer,
        config.task,
        max_context=config.engine.max_context or _own_context(config.model, tokenizer),
        max_tokens=config.max_tokens,
        prepare=prepare,
        index=index,
    )
    return prompts, Rewarder(config.reward, tasks, boxes)


def _own_context(model: ModelConfig, tokenizer: Any) -> int:
    """What the model says of its context, without its weights; 0 where it says nothing."""
    if model.path == TINY:
        return int(tokenizer.model_max_length)
    try:
        transformers = import_transformers()
        settings = transformers.AutoConfig.from_pretrained(model.path, **source_of(model))
        return context_length(SimpleNamespace(config=settings))
    except (OSError, ValueError, KeyError, UniRLError):
        return 0  # loading the model finds what is wrong with it, and says it better
