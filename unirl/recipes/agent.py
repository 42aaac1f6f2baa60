"""Agents: a language model attempts tasks in episodes of many turns, with tools or in a world, and
learns from what they earned.

    task -> sessions (agent, tools, engine, rewards) -> slots of one group -> queue -> learner
         -> weights -> engine

All but the episodes is as in `grpo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unirl.errors import UniRLError
from unirl.llm.agents.config import AgentConfig
from unirl.llm.trajectories.config import StoreConfig
from unirl.recipes import grpo
from unirl.runners.plan import Plan

IMPORTS_LATE = True


@dataclass(frozen=True)
class Config(grpo.Config):
    """Everything that can be set for a run with an agent."""

    agent: AgentConfig = field(default_factory=AgentConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    reuse_samples: bool = False
    """only = train: learn from all stored groups, again and again, whatever the store says of who
    has learned from them. False: from those that nobody has learned from, each once.
    """

    @property
    def max_tokens(self) -> int:
        """Of an episode behind its prompt."""
        return self.agent.max_episode_tokens

    @property
    def agent_config(self) -> AgentConfig:
        return self.agent

    @property
    def store_config(self) -> StoreConfig:
        return self.store

    @property
    def reuses_samples(self) -> bool:
        return self.reuse_samples

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "partial":
            raise UniRLError(
                "mode partial with an agent",
                "it interrupts generation at each batch, and what an episode's tools and world did "
                "cannot be kept until it is continued",
                "set mode to one-step-off or async: episodes continue while the learner learns",
            )
        for key, value in (
            ("rollout.function", self.rollout.function),
            ("rollout.filter", self.rollout.filter),
        ):
            if value:
                raise UniRLError(
                    f"{key} is {value}",
                    "it is for completions, and an agent makes episodes",
                    "leave it out; agent.function is an own agent",
                )
        if self.agent.max_episode_tokens < self.sampling.max_tokens:
            raise UniRLError(
                f"agent.max_episode_tokens is {self.agent.max_episode_tokens}",
                f"an episode holds at least one turn: sampling.max_tokens is "
                f"{self.sampling.max_tokens}",
                f"raise it to {self.sampling.max_tokens * self.agent.max_turns}, say",
            )
        if self.agent.episode_seconds >= self.queue.timeout_seconds:
            raise UniRLError(
                f"agent.episode_seconds is {self.agent.episode_seconds:g}",
                f"the learner waits {self.queue.timeout_seconds:g} s for a group "
                "(queue.timeout_seconds), and each of its episodes must end sooner",
                f"raise queue.timeout_seconds to {2 * self.agent.episode_seconds:g}, say, or lower "
                "agent.episode_seconds",
            )
        if self.agent.max_turns >= 2**15:
            raise UniRLError(
                f"agent.max_turns is {self.agent.max_turns}",
                f"a slot numbers turns with 16 bits: it must be < {2**15}",
                "lower it",
            )
        if self.only == "rollout" and not self.store.enabled:
            raise UniRLError(
                "only is rollout, and store.enabled is false",
                "nothing is learned and nothing would be kept",
                "leave store.enabled out",
            )
        if self.reuse_samples and self.only != "train":
            raise UniRLError(
                f"reuse_samples is true, and only is {self.only or 'not set'}",
                "it is about samples that were stored: only = train",
                "--only train --samples runs/NAME, or leave it out",
            )


def plan(config: Config) -> Plan:
    """See grpo.plan."""
    judges = config.agent.world or config.agent.function
    if judges and not config.reward.weights:
        reward = replace(config.reward, weights={"outcome": 1.0})
        config = replace(config, reward=reward)
    if config.only != "train":
        config = replace(config, store=config.store.with_id())
    return grpo.plan_of("agent", config)
