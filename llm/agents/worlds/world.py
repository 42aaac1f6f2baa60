"""What a world is: it is reset with a task, and answers text or calls of the model until it ends.

A failure of a world is `WorldFailed`, and means only what the policy cannot have caused: a server
that is gone, a step past its deadline, an answer that is no JSON, an exception in its code. The
episode is tried again with a fresh client. Whatever the policy can cause, such as an action that
the world does not know, is an observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from unirl.errors import Restartable
from unirl.llm.tasks.task import Examples, Message

if TYPE_CHECKING:
    from unirl.llm.agents.tool_calls import ToolCall

Action: TypeAlias = "str | ToolCall"
"""What the model said, or a call that was read from it."""
ToolSchema: TypeAlias = Mapping[str, Any]
"""As OpenAI's chat API has them: {"type": "function", "function": {name, description, parameters}}.
"""
Split = Literal["train", "held_out"]
RESET_SECONDS = 60.0
"""How long a reset may take at least: servers start processes then, or wait for a free place."""
CLOSE_SECONDS = 5.0
"""How long a world may take to let go of what it has."""


@dataclass(frozen=True)
class Observation:
    """What a world answers."""

    messages: tuple[Message, ...] = ()
    """To be put behind the conversation. Of a reset: behind the task's own messages."""
    reward: float | None = None
    """Of this step; None: the world says nothing about it."""
    terminated: bool = False
    """The task has ended, for good or ill."""
    truncated: bool = False
    """The world has stopped before the task's end, at a limit of its own."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Values that JSON can hold; never for the model."""
    is_invalid: bool = False
    """The world could make nothing of the action, says why, and nothing has happened."""
    tools: tuple[ToolSchema, ...] | None = None
    """What may be called from here on; None: as before."""

    @property
    def has_ended(self) -> bool:
        return self.terminated or self.truncated


class EnvClient(Protocol):
    """One episode at a time; made for each."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """task: messages, answer and info of the example. The same seed gives the same start, where
        the world can do that.
        """

    async def step(self, action: Action) -> Observation: ...

    async def close(self) -> None:
        """Let go of everything; idempotent, and never raises."""


@runtime_checkable
class Judging(Protocol):
    """A client that judges what was done when the episode's budget has ended it."""

    async def judge(self) -> float | None: ...


class World(Protocol):
    """A world by its name, made once for a process: what a run asks before its first episode, and
    a client for each one. All of them read text, and calls where they have tools; what they can
    make nothing of is answered as invalid.
    """

    @property
    def name(self) -> str: ...

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """What may be called in each episode, as far as it is known before; (): it reads text."""

    def __call__(self) -> EnvClient: ...

    def tasks(self, split: Split) -> Examples | None:
        """The tasks that it brings; None: it has none, the run's own task is used."""


class WorldFailed(Restartable):
    """A world failed by what the policy cannot have caused. kind: a short name, for counting."""

    def __init__(self, what: str, rule: str, remedy: str, kind: str = "failed") -> None:
        self.kind = kind
        super().__init__(what, rule, remedy)


class Bounded:
    """A world's client with a deadline for each step, and its failures with the world's name."""

    def __init__(self, client: EnvClient, name: str, seconds: float) -> None:
        self._client, self._name, self._seconds = client, name, seconds
        self._num_steps = 0
        self._is_closed = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._num_steps = 0
        async with self._deadline("its reset", max(self._seconds, RESET_SECONDS)):
            return await self._client.reset(task, seed)

    async def step(self, action: Action) -> Observation:
        self._num_steps += 1
        async with self._deadline(f"step {self._num_steps}", self._seconds):
            return await self._client.step(action)

    async def judge(self) -> float | None:
        if not isinstance(self._client, Judging):
            return None
        async with self._deadline("its judgement", self._seconds):
            return await self._client.judge()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._client.close()

    @contextlib.asynccontextmanager
    async def _deadline(self, what: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds) as timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise self._failed(what, f"TimeoutError: {error}", "time_out") from error
            raise self._failed(
                what, f"it took longer than {seconds:g} s, see agent.tool_seconds", "hung"
            ) from None
        except WorldFailed as error:
            raise self._failed(
                what, "; ".join(filter(None, error.parts[:2])), error.kind
            ) from error
        except (OSError, EOFError) as error:
            raise self._failed(what, f"{type(error).__name__}: {error}", "connection") from error

    def _failed(self, what: str, why: str, kind: str) -> WorldFailed:
        return WorldFailed(
            f"the world {self._name} failed at {what}",
            why,
            "the episode is tried again with a fresh one; see the world's own log",
            kind,
        )


def answered(action: Action, text: str) -> tuple[Message, ...]:
    """The message that a world's answer to an action is; none where it says nothing to text."""
    if isinstance(action, str):
        return ({"role": "user", "content": text},) if text else ()
    return ({"role": "tool", "tool_call_id": action.id, "name": action.name, "content": text},)


def shortened(text: str, limit: int) -> str:
    """At most limit characters; the rest is cut out of the middle, and how much is said."""
    if len(text) <= limit:
        return text
    mark = f"\n[... {len(text) - limit} characters left out ...]\n"
    kept = max(limit - len(mark), 0)
    head = kept - kept // 3
    return (text[:head] + mark + text[len(text) - kept // 3 :])[: max(limit, len(mark))]


def in_text(fields: Mapping[str, Any]) -> str:
    """A structured observation for a model: its one text, or a line for each field."""
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return "\n".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in fields.items()
    )
