"""The agent of a config, made in the process that needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.agent import Agent, FunctionAgent
from unirl.llm.agents.bridge import Bridge
from unirl.llm.agents.command import CommandAgent, Door
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.native import NativeAgent
from unirl.llm.agents.rollout import MakeSession
from unirl.llm.agents.session import Session
from unirl.llm.agents.tools.interpreter import PythonSource
from unirl.llm.agents.tools.make import make_tools
from unirl.llm.agents.worlds.make import make_world
from unirl.llm.sandbox.box import SandboxCounts


def make_agent(
    config: AgentConfig, make_door: Callable[[], Door], counts: SandboxCounts | None = None
) -> Agent:
    """make_door: an endpoint for an agent that is a program. counts: of its tool `python`. Raises
    UniRLError for names that stand for nothing, and where there is nothing to do.
    """
    if config.function:
        return FunctionAgent(config.function)
    if config.command:
        return CommandAgent(config.command, make_door())
    if not config.tools and not config.world:
        raise UniRLError(
            "the agent has nothing to act with",
            "agent.tools, agent.world, agent.function and agent.command are all empty",
            "--agent.tools calculator, say; without tools and turns, train with grpo",
        )
    tools = world = None
    if config.tools:
        tools = make_tools(
            config.tools,
            config.options,
            seconds=config.tool_seconds,
            max_chars=config.max_observation,
            sources={"python": PythonSource(config.sandbox, counts)},
        )
    if config.world:
        world = make_world(
            config.world, config.options, seconds=config.tool_seconds, sandbox=config.sandbox
        )
    return NativeAgent(config, tools, world)


def make_bridge(config: AgentConfig, tokenizer: Any, options: Mapping[str, Any]) -> Bridge:
    """tokenizer: of transformers. options: of the chat template."""
    return Bridge(
        tokenizer, options, describes=config.describe_tools, is_brief=config.calls == "brief"
    )


def session_maker(config: AgentConfig, bridge: Bridge, context: int = 0) -> MakeSession:
    """context: as Session."""

    def make(id: str, draw: Any, *, sampling: Any, **rest: Any) -> Session:
        return Session(id, draw, bridge, config, sampling, context=context, **rest)

    return make
