"""What the config of a language recipe must have."""

from __future__ import annotations

from typing import Protocol

from unirl.core.queue import QueueConfig
from unirl.llm.agents.config import AgentConfig
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.engine import EngineConfig, SamplingConfig
from unirl.llm.learner_config import CriticConfig, LlmLearnerConfig
from unirl.llm.models.model import ModelConfig
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rollout import RolloutConfig
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.training.distill import TeacherConfig
from unirl.llm.trajectories.config import StoreConfig
from unirl.runners.config import RunConfig


class LanguageConfig(Protocol):
    """What a recipe's config must have."""

    @property
    def mode(self) -> str: ...
    @property
    def only(self) -> str | None: ...
    @property
    def max_staleness(self) -> int: ...
    @property
    def max_tokens(self) -> int:
        """Of a completion, or an episode."""

    @property
    def agent_config(self) -> AgentConfig | None:
        """None: prompts are answered once, by completions."""

    @property
    def store_config(self) -> StoreConfig | None:
        """Where episodes are kept; None: there are none."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def task(self) -> TaskConfig: ...
    @property
    def reward(self) -> RewardConfig: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def teacher(self) -> TeacherConfig: ...
    @property
    def learner(self) -> LlmLearnerConfig: ...
    @property
    def critic(self) -> CriticConfig: ...
    @property
    def queue(self) -> QueueConfig: ...
    @property
    def run(self) -> RunConfig: ...
