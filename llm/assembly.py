"""The pieces of a language recipe, made from its config in the process that needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unirl.core.learner import LearnerContext
from unirl.core.tree import flatten
from unirl.core.weights import Weights
from unirl.device import device_name
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.llm.agents.agent import Agent
from unirl.llm.agents.config import AgentConfig
from unirl.llm.algorithms.describe import describe
from unirl.llm.algorithms.resolve import check_group_size, check_num_steps, resolve
from unirl.llm.algorithms.terms import Algorithm
from unirl.llm.algorithms.turn_credit import TurnCredit
from unirl.llm.device import device_of
from unirl.llm.engines.make import make_engine, require_engine, takes_adapters
from unirl.llm.evaluate import require_held_out
from unirl.llm.evaluation_link import EvaluationLink
from unirl.llm.generating import agent_of, make_prompts
from unirl.llm.group import GroupShape
from unirl.llm.language_config import LanguageConfig
from unirl.llm.models.dtype import settle_dtype, warn_if_emulated
from unirl.llm.models.lora import (
    add_adapters,
    published_adapters,
    published_weights,
)
from unirl.llm.models.model import (
    ModelConfig,
    check_effect,
    load_model,
    load_tokenizer,
)
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.llm.tasks.prompts import PromptIndex
from unirl.llm.training.distill import TeacherConfig, make_teacher
from unirl.llm.training.language_policy import LanguagePolicy, check_critic, make_critic
from unirl.llm.training.learner import LlmLearner
from unirl.llm.training.packed_check import check_packing
from unirl.llm.training.sharding import shard
from unirl.llm.trajectories.keeper import check_store


@dataclass(frozen=True)
class LanguageFacts:
    """The size of a slot, what a checkpoint must agree on, and what is in force."""

    shape: GroupShape
    fingerprint: Mapping[str, Any]
    notes: tuple[str, ...]
    prompts: PromptIndex | None = None
    """Which examples are asked; None: none are."""


def settle_dtypes(config: LanguageConfig) -> tuple[ModelConfig, TeacherConfig, str]:
    """Model and teacher with what they compute in decided by the devices of the run, and a line
    about it. The engine computes as the learner does, unless engine.dtype says otherwise.
    """
    learner = device_name(config.learner.device)
    devices = [learner] if config.only != "rollout" else []
    if config.only != "train" and not config.engine.is_server and config.engine.dtype == "auto":
        devices.append(device_name(config.engine.device))
    dtype, why = settle_dtype(config.model, *devices)
    teacher = config.teacher
    if teacher.path and not teacher.url:
        frozen = replace(config.model, path=teacher.path, dtype=teacher.dtype, revision="")
        teacher = replace(teacher, dtype=settle_dtype(frozen, learner)[0])
    return replace(config.model, dtype=dtype), teacher, f"dtype       {why}"


def probe(
    config: LanguageConfig, shape: GroupShape | None = None, task: str | Sequence[str] = ""
) -> LanguageFacts:
    """Load everything but the model, so that what cannot work fails before anything is started.

    shape, task: of the groups that are learned from where none are generated.
    """
    algorithm, generates = algorithm_of(config), shape is None
    index = None
    check_effect(config.model)
    if config.only != "rollout":
        _require_trainable(config, algorithm)
        config.run.check_schedules(
            {
                "learner.optimizer.lr_schedule": config.learner.optimizer.lr_schedule,
                "algorithm.entropy_schedule": algorithm.entropy_schedule,
            }
        )
    if generates:
        config.rollout.load_function(), config.rollout.load_filter()
        if config.agent_config is not None:
            config.agent_config.load_process()
            check_store(config.store_config)
        require_engine(config.engine, config.model)
        _require_sleep(config)
    if generates or config.run.eval_steps:
        agent = agent_of(config)
        prompts, rewarder = make_prompts(config, agent=agent)
        rewarder.close()
        if agent is not None and config.agent_config is not None:
            asyncio.run(_try_out(agent, config.agent_config))
        index = prompts.index
        if config.run.eval_steps:
            require_held_out(prompts)
    return LanguageFacts(
        shape
        or GroupShape(
            config.rollout.group_size,
            prompts.longest,
            config.max_tokens,
            len(rewarder.names),
            config.agent_config.max_segments if config.agent_config is not None else 0,
        ),
        {
            "model": config.model.path,
            "lora_rank": config.model.lora_rank,
            "task": task or config.task.names,
        },
        (f"algorithm   {algorithm.name}", *describe(algorithm).splitlines())
        if config.only != "rollout"
        else ("learner     none: groups are written until run.total_steps",),
        index,
    )


async def _try_out(agent: Agent, config: AgentConfig) -> None:
    """Raise UniRLError where the sandboxes that it asks for cannot be had here."""
    await agent.close()
    if "python" in config.tools:
        await (await make_sandboxes(config.sandbox)).close()


def _require_trainable(config: LanguageConfig, algorithm: Algorithm) -> None:
    rollout, alone = config.rollout, config.teacher.alone
    if not alone:  # a teacher that teaches alone needs no baseline
        check_group_size(algorithm, rollout.group_size)
    elif rollout.zero_variance == "discard":
        raise UniRLError(
            "rollout.zero_variance is discard and the teacher teaches alone",
            "with teacher.alone a group whose rewards are equal teaches as much as any other",
            "leave rollout.zero_variance out",
        )
    check_critic(config.critic, algorithm, config.model)
    check_num_steps(algorithm, config.learner.epochs * config.learner.minibatches)
    if config.learner.minibatches * config.learner.ranks > config.queue.batch_size:
        raise UniRLError(
            f"learner.minibatches is {config.learner.minibatches}, "
            f"and learner.ranks {config.learner.ranks}",
            f"each takes whole groups, and queue.batch_size is {config.queue.batch_size}",
            "lower learner.minibatches, or raise queue.batch_size",
        )


def _require_sleep(config: LanguageConfig) -> None:
    if config.mode != "colocated":
        return
    # Made and not started there is nothing to close.
    if make_engine(config.engine, config.model).capabilities.sleep:
        return
    server = config.engine.is_server
    raise UniRLError(
        f"mode colocated with engine {config.engine.kind}{' behind a server' if server else ''}",
        "the engine gives its memory back while the learner learns, and this one cannot sleep",
        "set mode to sync"
        if server
        else "set engine.options.enable_sleep_mode to true, or mode to sync",
    )


def algorithm_of(config: LanguageConfig) -> Algorithm:
    return resolve(config.algorithm, max_tokens=config.max_tokens)


def make_learner(
    context: LearnerContext,
    *,
    config: LanguageConfig,
    ranks: Ranks | None = None,
    link: EvaluationLink | None = None,
) -> LlmLearner:
    """The factory of a plan's learner. ranks: the processes that train together."""
    ranks = ranks or Ranks()
    if link is not None:
        link.open()
    algorithm = algorithm_of(config)
    # auto first: of several processes each has a device of its own.
    device = torch.device(ranks.own_device(device_of(config.learner.device, "learner.device")))
    torch.manual_seed(context.seed % 2**63)  # adapters begin at random
    policy = make_policy(config, algorithm, device)
    warn_if_emulated(policy.model, "the learner", "model.dtype")
    check_packing(policy.model, config.sampling.temperature)
    if policy.own_critic is not None:
        check_packing(policy.own_critic.model, config.sampling.temperature)
    reference = None
    if algorithm.needs_reference and config.model.lora_rank == 0:
        frozen = load_model(config.model, device).requires_grad_(False)
        reference = LanguagePolicy(frozen, temperature=config.sampling.temperature)
    teacher = make_teacher(
        config.teacher, config.model, device, temperature=config.sampling.temperature
    )
    if config.model.shard and ranks.world_size > 1:
        for each in (policy, reference, teacher.policy if teacher is not None else None):
            if isinstance(each, LanguagePolicy):
                shard(each, ranks)
    return LlmLearner(
        policy,
        algorithm,
        config.learner,
        reward_weights=config.reward.weight_of,
        max_tokens=config.max_tokens,
        skip_zero=config.rollout.zero_variance != "train",
        budget=config.run.budget,
        seed=context.seed,
        num_recent=config.run.target_window,
        reference=reference,
        teacher=teacher,
        tokenizer=load_tokenizer(config.model),
        ranks=ranks,
        publish=publisher(config),
        give_up_after=config.rollout.give_up_after,
        critic=config.critic,
        credit=turn_credit(config.agent_config),
    )


def turn_credit(agent: AgentConfig | None) -> TurnCredit | None:
    if agent is None or agent.credit == "outcome":
        return None
    return TurnCredit(agent.credit, agent.turn_discount, agent.turn_groups, agent.turn_weight)


def publisher(config: LanguageConfig) -> Callable[[Any], Weights]:
    """What of a model the engine is sent."""
    return published_adapters if takes_adapters(config.engine) else published_weights


def weights_of(model: Mapping[str, Any], *, config: LanguageConfig) -> Weights:
    """Whole weights, adapters merged, of the model of a checkpoint."""
    policy = make_policy(config, algorithm_of(config), torch.device("cpu"), learns=False)
    saved = flatten(model)
    learned = {name for name, value in policy.named_parameters() if value.requires_grad}
    if missing := sorted(learned - saved.keys()):
        raise UniRLError(
            f"the checkpoint has no {missing[0]}",
            f"{len(missing)} of {len(learned)} parameters that learn are not in it",
            "use it with the model settings of its run",
        )
    policy.load_state_dict(saved, strict=False)
    return published_weights(policy.model)


def make_policy(
    config: LanguageConfig, algorithm: Algorithm, device: torch.device, *, learns: bool = True
) -> LanguagePolicy:
    """learns: False where a critic's own model is of no use."""
    model = add_adapters(load_model(config.model, device), config.model)
    if config.model.lora_rank == 0:
        model.requires_grad_(True)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # its layers look at this; dropout is zero
    own = algorithm.needs_critic and algorithm.critic == "model"
    return LanguagePolicy(
        model,
        temperature=config.sampling.temperature,
        critic=algorithm.needs_critic and not own,
        detached=algorithm.critic == "detached",
        own_critic=make_critic(config.critic, config.model, device) if own and learns else None,
    )
