"""The agent of a config, made in the process that needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.agent import Agent, FunctionAgent
from unirl.llm.agents.bridge import Bridge
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.native import NativeAgent
from unirl.llm.agents.rollout import MakeSession
from unirl.llm.agents.session import Session
from unirl.llm.agents.tools.make import make_tools
from unirl.llm.agents.tools.tool import Tools
from unirl.llm.agents.worlds.make import make_world
from unirl.llm.agents.worlds.world import World


def make_agent(config: AgentConfig) -> Agent:
    """Raises UniRLError for names that stand for nothing, and where there is nothing to do."""
    if config.function:
        return FunctionAgent(config.function)
    tools = _tools(config)
    world = _world(config)
    if tools is None and world is None:
        raise UniRLError(
            "the agent has nothing to act with",
            "agent.tools, agent.world, agent.function and agent.command are all empty",
            "--agent.tools calculator, say; without tools and turns, train with grpo",
        )
    return NativeAgent(config, tools, world)


def schemas_of(config: AgentConfig) -> tuple[dict[str, Any], ...]:
    """What the prompt of each episode says may be called; () where the agent alone knows that."""
    if config.function or config.command:
        return ()
    tools = _tools(config)
    own = tuple(dict(each) for each in tools.schemas) if tools is not None else ()
    world = _world(config)
    return (*own, *(dict(each) for each in (world.tools if world is not None else ())))


def make_bridge(config: AgentConfig, tokenizer: Any, options: Mapping[str, Any]) -> Bridge:
    """tokenizer: of transformers. options: of the chat template."""
    return Bridge(tokenizer, options, describes=config.calls != "brief")


def session_maker(config: AgentConfig, bridge: Bridge, context: int = 0) -> MakeSession:
    """context: as Session."""

    def make(id: str, draw: Any, *, sampling: Any, **rest: Any) -> Session:
        return Session(id, draw, bridge, config, sampling, context=context, **rest)

    return make


def _world(config: AgentConfig) -> World | None:
    if not config.world:
        return None
    return make_world(config.world, config.options, seconds=config.tool_seconds)


def _tools(config: AgentConfig) -> Tools | None:
    if not config.tools:
        return None
    return make_tools(
        config.tools,
        config.options,
        seconds=config.tool_seconds,
        max_chars=config.max_observation,
    )
