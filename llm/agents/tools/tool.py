"""Tools, as an episode has them: each a name, a JSON schema and a coroutine.

What goes wrong in a call is an answer for the model: a name that there is none of, arguments that
do not fit, an exception, a deadline. Only a `Restartable`, such as a server of tools that has died,
ends the episode, as the policy cannot have caused it. No call is ever repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from unirl.errors import Restartable, UniRLError, suggestion
from unirl.llm.agents.tools.schema import NAME, Schema, complaint
from unirl.llm.agents.worlds.world import ToolSchema, shortened
from unirl.llm.tasks.task import Message

if TYPE_CHECKING:
    from unirl.llm.agents.tool_calls import ToolCall

Ended = Literal["ok", "unknown", "arguments", "error", "time_out"]


class ToolSpec(NamedTuple):
    """What a model is given word of."""

    name: str
    description: str
    parameters: Schema

    @property
    def schema(self) -> ToolSchema:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


Call = Callable[[dict[str, Any]], Awaitable[Any]]


@dataclass(frozen=True)
class Prepared:
    """A call that first waits for something that others use too; the model's time is not up
    meanwhile.
    """

    ready: Callable[[], AbstractAsyncContextManager[Call]]
    """Raises a Restartable where it waits too long."""

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        async with self.ready() as run:
            return await run(arguments)


def _prepared(call: Call) -> AbstractAsyncContextManager[Call]:
    return call.ready() if isinstance(call, Prepared) else contextlib.nullcontext(call)


class Opened(Protocol):
    """A source of tools as one episode has it."""

    def calls(self) -> Mapping[str, Call]: ...

    async def close(self) -> None: ...


class ToolSource(Protocol):
    """A function, a class or a server, made once for a process."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    async def open(self, task: Mapping[str, Any]) -> Opened: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class ToolResult:
    """What came of a call."""

    call: ToolCall
    text: str
    """For the model: the result, or what went wrong."""
    ended: Ended
    seconds: float

    @property
    def message(self) -> Message:
        return {
            "role": "tool",
            "tool_call_id": self.call.id,
            "name": self.call.name,
            "content": self.text,
        }


class Toolbox:
    """The tools of one episode, with whatever they remember of it."""

    def __init__(
        self, specs: Sequence[ToolSpec], opened: Sequence[Opened], seconds: float, max_chars: int
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._opened = opened
        self._calls = {name: call for each in opened for name, call in each.calls().items()}
        self._seconds, self._max_chars = seconds, max_chars

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(spec.schema for spec in self._specs.values())

    async def call(self, call: ToolCall) -> ToolResult:
        started = time.perf_counter()
        text, ended = await self._text(call)
        seconds = time.perf_counter() - started
        return ToolResult(call, shortened(text, self._max_chars), ended, seconds)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """At the same time; in the order of the calls."""
        results = await asyncio.gather(*map(self.call, calls), return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return results  # type: ignore[return-value]

    async def close(self) -> None:
        """Idempotent."""
        opened, self._opened = self._opened, ()
        await asyncio.gather(*(each.close() for each in opened), return_exceptions=True)

    async def _text(self, call: ToolCall) -> tuple[str, Ended]:
        spec = self._specs.get(call.name)
        if spec is None:
            names = ", ".join(self._specs) or "none"
            hint = suggestion(call.name, self._specs)
            return (
                f"Error: there is no tool {call.name}; there are: {names}. {hint}".strip(),
                "unknown",
            )
        wrong = complaint(call.arguments, spec.parameters)
        if wrong:
            return f"Error: {wrong}.", "arguments"
        async with _prepared(self._calls[call.name]) as run:
            return await self._timed(call, run)

    async def _timed(self, call: ToolCall, run: Call) -> tuple[str, Ended]:
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                result = await run(dict(call.arguments))
        except Restartable:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                text = f"Error: {call.name} took longer than {self._seconds:g} s and was stopped."
                return text, "time_out"
            if isinstance(error, ToolError):
                return f"Error: {error}", "error"
            return f"Error: {type(error).__name__}: {error}", "error"
        return as_text(result), "ok"


class Tools:
    """All tools of a run; `open` gives an episode its own."""

    def __init__(self, sources: Sequence[ToolSource], seconds: float, max_chars: int) -> None:
        self._sources = sources
        self._seconds, self._max_chars = seconds, max_chars
        self.specs = checked_specs([spec for source in sources for spec in source.specs])

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(spec.schema for spec in self.specs)

    async def open(self, task: Mapping[str, Any]) -> Toolbox:
        """Raises WorldFailed where a tool cannot be made."""
        opened: list[Opened] = []
        try:
            for source in self._sources:
                opened.append(await source.open(task))
        except BaseException:
            await asyncio.gather(*(each.close() for each in opened), return_exceptions=True)
            raise
        return Toolbox(self.specs, opened, self._seconds, self._max_chars)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._sources), return_exceptions=True)


class ToolError(Exception):
    """What a tool says went wrong, in words for the model."""


def checked_specs(specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    names: set[str] = set()
    for spec in specs:
        if not NAME.fullmatch(spec.name):
            raise UniRLError(
                f'the tool "{spec.name}" cannot be called by this name',
                "a name is 1 to 64 letters, digits, _ and -",
                "rename it",
            )
        if spec.name in names:
            raise UniRLError(
                f"two tools are named {spec.name}",
                "a model calls a tool by its name alone, so each name occurs once in agent.tools",
                "rename one of them, or leave it out",
            )
        names.add(spec.name)
    return tuple(specs)


def as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    return json.dumps(result, ensure_ascii=False, default=str)
