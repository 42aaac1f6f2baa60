"""The agent that is there without one: the model answers, and what it calls is called, or its world
takes a step. Without a world, an answer without a call ends the episode.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from unirl.llm.agents.agent import AgentTask
from unirl.llm.agents.answer import Answer, EpisodeEnded
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.session import Session
from unirl.llm.agents.tool_calls import ToolCall, calls_of
from unirl.llm.agents.tools.tool import Toolbox, Tools
from unirl.llm.agents.worlds.world import EnvClient, Judging, Observation, World
from unirl.llm.outcome import Ending
from unirl.llm.tasks.task import Message, Task


class NativeAgent:
    """tools, world: of all episodes; each opens its own. None: there are none."""

    def __init__(self, config: AgentConfig, tools: Tools | None, world: World | None) -> None:
        self._config, self._tools, self._world = config, tools, world

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        own = self._tools.schemas if self._tools is not None else ()
        return (*own, *(self._world.tools if self._world is not None else ()))

    def task(self) -> Task | None:
        if self._world is None or (train := self._world.tasks("train")) is None:
            return None
        return Task(self._world.name, train, self._world.tasks("held_out") or (), "outcome")

    async def run(self, task: AgentTask, session: Session) -> Ending:
        fields = {key: value for key, value in asdict(task).items() if key != "seed"}
        toolbox = await self._tools.open(fields) if self._tools is not None else None
        client: EnvClient | None = None
        try:
            if self._world is not None:
                client = self._world()
            return await _Episode(self._config, session, toolbox, client).run(
                task, fields, self._world.tools if self._world is not None else ()
            )
        finally:
            if client is not None:
                await client.close()
            if toolbox is not None:
                await toolbox.close()

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.close()


class _Episode:
    def __init__(
        self,
        config: AgentConfig,
        session: Session,
        toolbox: Toolbox | None,
        client: EnvClient | None,
    ) -> None:
        self._config, self._session, self._client = config, session, client
        self._toolbox, self._own = toolbox, frozenset[str]()
        self._schemas: tuple[Any, ...] = ()
        if toolbox is not None:
            self._schemas = toolbox.schemas
            self._own = frozenset(each["function"]["name"] for each in toolbox.schemas)
        self._num_invalid = 0

    async def run(self, task: AgentTask, fields: dict[str, Any], tools: Sequence[Any]) -> Ending:
        messages, worlds = list(task.messages), tuple(tools)
        if self._client is not None:
            first = await self._client.reset(fields, task.seed)
            messages += first.messages
            worlds = worlds if first.tools is None else first.tools
            if first.has_ended:
                return "stop"
        while True:  # the session's budgets end it
            try:
                answer = await self._session.chat(messages, tools=(*self._schemas, *worlds))
            except EpisodeEnded:
                await self._judged()
                raise
            messages.append(answer.message)
            calls = calls_of(answer.message)
            invalid = bool(answer.errors)
            if not calls and not invalid and self._client is None:
                return "context" if answer.finish == "length" else "stop"
            seen, observation = await self._act(answer, calls)
            if observation is not None:
                invalid = invalid or observation.is_invalid
                if observation.tools is not None:
                    worlds = observation.tools
                if observation.has_ended:
                    return "stop"
            self._num_invalid = self._num_invalid + 1 if invalid else 0
            if self._num_invalid >= self._config.max_invalid:
                return "invalid"
            messages += seen

    async def _act(
        self, answer: Answer, calls: Sequence[ToolCall]
    ) -> tuple[list[Message], Observation | None]:
        """Calls of own tools all at a time, those of the world one after the other. Returns what
        the model is given, and the world's last word.
        """
        started = time.monotonic()
        seen: list[Message] = []
        own = [call for call in calls if self._client is None or call.name in self._own]
        failed, observation = 0, None
        if own and self._toolbox is not None:
            results = await self._toolbox.call_all(own)
            failed = sum(result.ended != "ok" for result in results)
            if self._config.calls == "brief":
                results = [
                    each if each.ended == "ok" else replace(each, text="?") for each in results
                ]
            seen += [result.message for result in results]
        if self._client is not None:
            actions: list[str | ToolCall] = [call for call in calls if call not in own]
            if not calls and not answer.errors:
                actions = [str(answer.message.get("content") or "")]
            for action in actions:
                observation = await self._client.step(action)
                seen += observation.messages
                self._pay(answer.turn, observation)
                if observation.has_ended:
                    break
        # Behind what tools said: templates want that next to the calls.
        seen += [{"role": "user", "content": f"Error: {each}"} for each in answer.errors]
        self._session.episode.turns[answer.turn].info.update(
            calls=len(calls),
            invalid_calls=len(answer.errors),
            failed_calls=failed,
            tool_seconds=time.monotonic() - started,
        )
        return seen, observation

    async def _judged(self) -> None:
        """What was done is judged as it is, where the world can do that."""
        turns = self._session.episode.turns
        if turns and isinstance(self._client, Judging):
            reward = await self._client.judge()
            self._pay(len(turns) - 1, Observation(reward=reward))

    def _pay(self, turn: int, observation: Observation) -> None:
        """The outcome of an episode in a world is the sum of what its steps earned."""
        if observation.reward is not None:
            episode = self._session.episode
            episode.outcome = (episode.outcome or 0.0) + observation.reward
            self._session.reward(observation.reward, turn)
