"""How a language model acts: who drives it, what it may call, and its budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unirl.config.rules import check_at_least, check_positive
from unirl.errors import UniRLError
from unirl.imports import load_own
from unirl.llm.sandbox.config import SandboxConfig

Credit = Literal["outcome", "turn", "both"]
Compare = Literal["state", "number", "token"]
ProcessReward = Callable[..., Sequence[float | Sequence[float]]]
"""Of turns, answer and info of an ended episode: for each turn a number, or one for each token."""


@dataclass(frozen=True)
class AgentConfig:
    """One of `function`, `command` and `world` drives; without them the model's answers are read
    for calls of `tools`, and one without a call ends the episode.
    """

    tools: tuple[str, ...] = field(default=(), metadata={"common": True})
    """What the model may call: calculator, python (in a sandbox), search, mcp:COMMAND or URL,
    module:function, or module:Class whose public methods are tools, made for each episode.
    """
    world: str = field(default="", metadata={"common": True})
    """An environment that answers what the model says: gym:ID, text:module:Class, openenv:URL,
    nemo:URL, skyrl:NAME, verifiers:NAME (a taskset), harbor:FOLDER (its tasks, without images).
    """
    function: str = ""
    """module:attr of an own agent: async (session, task) -> a number, an ending, or nothing."""
    command: str = ""
    """A program that is the agent: it finds an OpenAI-compatible server in OPENAI_BASE_URL and
    OPENAI_API_KEY, its task as JSON in UNIRL_TASK, or in the file that UNIRL_TASK_FILE names where
    it is longer than 100 kB, and may have an interpreter of its own.
    """
    options: Mapping[str, str] = field(default_factory=dict)
    """Settings of the world or the tools, by their names."""
    calls: Literal["hermes", "brief"] = "hermes"
    """How calls are written. hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
    brief: an answer that begins with "=" calls the first tool with the rest of its line, and "?"
    answers a call that failed, for models from scratch that know neither JSON nor words.
    """
    describe_tools: bool = True
    """Whether the model is given the schemas of its tools. False: shorter prompts, for models that
    know them, or learn of them from their task's messages. With brief calls it never is.
    """
    max_turns: int = field(default=8, metadata={"common": True})
    """Answers of the model in an episode. More: longer attempts."""
    max_episode_tokens: int = field(default=2048, metadata={"common": True})
    """Tokens of an episode behind its prompt, drawn or given. More: longer attempts, larger slots.
    What one answer may draw is sampling.max_tokens.
    """
    max_segments: int = 1
    """Paths of an episode that are learned from, where its history is rewritten or forks. More:
    more of what such agents did is learned from, larger slots.
    """
    max_invalid: int = 3
    """Calls in a row that nothing can be made of; then the episode ends as invalid."""
    episode_seconds: float = 300.0
    """How long an episode may take, repeated attempts included; then it ends, and is judged as it
    is, unless an attempt before it has failed.
    """
    tool_seconds: float = 30.0
    """How long a call or a step of the world may take; the model is given word of a call that took
    longer. So long may process_reward take for an episode, too; then its group is discarded.
    """
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Of the tool python, and of harbor's tasks."""
    max_observation: int = 4000
    """Characters of what a tool says that the model is given; the rest is cut out of the middle."""
    retries: int = 2
    """How often an episode is tried again that failed for what the policy cannot have caused. More:
    sits out longer outages. After that its group is discarded and counted.
    """
    max_episodes: int = 0
    """Episodes that an engine's process has at a time. 0: all of its groups."""
    oversample: int = 0
    """Episodes begun in a group beyond rollout.group_size; the last ones are cancelled when enough
    have ended, and as many may fail. More: slow episodes cost less, and long ones are learned from
    less often.
    """
    quorum: float = 0.5
    """Share of a group's episodes that must have ended before the rest may be cancelled, in mode
    async: when the group would get older than queue.max_staleness, and when three of four groups in
    flight wait for their last episodes. What is cancelled is counted, and has no score. More: slow
    episodes cost more, and are learned from more often. 1: all are waited for.
    """
    process_reward: str = ""
    """module:function of step rewards beside those of the world or the agent: it is given turns,
    answer and info of an ended episode and returns for each turn a number, or one for each of its
    tokens, whose texts are turn["tokens"]. Counted where `credit` says so.
    """
    credit: Credit = "outcome"
    """What a token's advantage comes from. outcome: the episode's rewards, alike for all its turns.
    turn: the step rewards from its turn on. both: their sum.
    """
    turn_discount: float = 1.0
    """Of step rewards, for each turn that they come later. Less: only near turns get credit."""
    turn_groups: Compare = "state"
    """Which turns of a group's episodes are compared for credit. state: those that were given the
    same (GiGPO); number: those of the same number. token: not turns, but their tokens, each with
    those in the same place of turns of the same number, and where these earn the same, with those
    of all groups of a batch: what a prompt always gets wrong is learned from too. turn_discount is
    for each token then.
    """
    turn_weight: float = 1.0
    """credit both: of the part that comes from step rewards."""

    def __post_init__(self) -> None:
        check_at_least(
            1, "agent", self, "max_turns", "max_episode_tokens", "max_segments", "max_invalid"
        )
        check_at_least(0, "agent", self, "retries", "max_episodes", "oversample", "turn_weight")
        for name in ("episode_seconds", "tool_seconds"):
            check_positive(f"agent.{name}", getattr(self, name), "leave it out for the default")
        check_at_least(40, "agent", self, "max_observation")
        drivers = [key for key in ("function", "command", "world") if getattr(self, key)]
        if len(drivers) > 1:
            raise UniRLError(
                f"agent has {' and '.join(drivers)}",
                "one of function, command and world drives an episode",
                f"leave out all but agent.{drivers[0]}",
            )
        for name, at_one in (
            ("turn_discount", "1 counts all later turns alike"),
            ("quorum", "1 waits for all episodes of a group"),
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise UniRLError(
                    f"agent.{name} is {getattr(self, name)}", "it must be in [0, 1]", at_one
                )

    def load_process(self) -> ProcessReward | None:
        """What gives step rewards at an episode's end. Raises UniRLError where there is no such
        function.
        """
        if not self.process_reward:
            return None
        name = f"agent.process_reward {self.process_reward}"
        found: ProcessReward = load_own(self.process_reward, name)
        return found
