"""Tools that are code of the user's own: a function, or a class whose public methods they are.

A class is made for each episode, so that it can remember; what of it is not async runs in a thread
of its own, one call after the other. Functions run at the same time. A class whose __init__ takes
`task` is given messages, answer and info of the episode's task.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from unirl.errors import Restartable, UniRLError, format_error
from unirl.imports import load_own
from unirl.llm.agents.threads import OwnThread, Threads
from unirl.llm.agents.tools.schema import schema_of
from unirl.llm.agents.tools.tool import Call, Opened, ToolSource, ToolSpec
from unirl.llm.agents.worlds.world import WorldFailed


def own_tools(name: str) -> ToolSource:
    """The tools that `module:function` or `module:Class` names."""
    found = load_own(name, f'the tool "{name}"')
    if inspect.isclass(found):
        return ClassTools(found, name)
    if not callable(found):
        raise UniRLError(
            f'the tool "{name}" cannot be called',
            f"it must be a function or a class, and is {found!r:.60}",
            "name a function",
        )
    return FunctionTool(found, name)


class FunctionTool:
    """One function, with no state of an episode: it is its own `Opened`. is_quick: it takes well
    below a millisecond whatever it is given, which is less than a thread costs, and is called on
    the event loop.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, is_quick: bool = False) -> None:
        self._function, self._threads, self._is_quick = function, Threads(), is_quick
        own_name = getattr(function, "__name__", type(function).__name__)
        self.specs = (ToolSpec(own_name, *schema_of(function, f'the tool "{name}"')),)

    async def open(self, task: Mapping[str, Any]) -> Opened:
        return _Calls({self.specs[0].name: self._call})

    async def close(self) -> None:
        self._threads.close()

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if self._is_quick:
            return self._function(**arguments)
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        result = await self._threads.call(lambda: self._function(**arguments))
        return await result if inspect.isawaitable(result) else result


class ClassTools:
    def __init__(self, kind: type, name: str) -> None:
        self._class, self._name = kind, name
        methods = [
            (key, getattr(kind, key))
            for key in dir(kind)
            if not key.startswith("_") and key != "close" and callable(getattr(kind, key))
        ]
        if not methods:
            raise UniRLError(
                f'the tool "{name}" has no public methods',
                "they are what the model calls",
                "name a function, or add a method without a leading underscore",
            )
        self.specs = tuple(self._spec(key, method) for key, method in methods)
        wanted = [
            each
            for each in inspect.signature(kind).parameters.values()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if any(each.name != "task" for each in wanted):
            names = ", ".join(each.name for each in wanted if each.name != "task")
            raise UniRLError(
                f'the tool "{name}" cannot be made',
                f"a class of tools is made with task or nothing, and this one needs {names}",
                "give these a default",
            )
        self._takes_task = "task" in inspect.signature(kind).parameters

    async def open(self, task: Mapping[str, Any]) -> Opened:
        thread = OwnThread()
        make = partial(self._class, task=task) if self._takes_task else self._class
        try:
            made = await thread.call(make)
        except Restartable:
            raise
        except Exception as error:
            thread.close()
            raise WorldFailed(
                f'the tool "{self._name}" could not be made',
                format_error(error),
                "the episode is tried again with a fresh one",
                "code",
            ) from error
        return _Object(made, [spec.name for spec in self.specs], thread)

    async def close(self) -> None:
        """Each episode lets go of its own."""

    def _spec(self, key: str, method: Any) -> ToolSpec:
        # A plain method is seen without an object: its first parameter is no argument of a call.
        is_plain = not isinstance(
            inspect.getattr_static(self._class, key), staticmethod | classmethod
        )
        described = schema_of(method, f'{key} of "{self._name}"', skip=int(is_plain))
        return ToolSpec(key, *described)


class _Calls:
    def __init__(self, calls: Mapping[str, Call]) -> None:
        self._calls = calls

    def calls(self) -> Mapping[str, Call]:
        return self._calls

    async def close(self) -> None:
        """Nothing is remembered."""


class _Object:
    """One episode's object."""

    def __init__(self, made: Any, names: list[str], thread: OwnThread) -> None:
        self._made, self._names, self._thread = made, names, thread

    def calls(self) -> Mapping[str, Call]:
        return {name: partial(self._call, name) for name in self._names}

    async def close(self) -> None:
        close = getattr(self._made, "close", None)
        try:
            if inspect.iscoroutinefunction(close):
                await close()
            elif callable(close):
                await self._thread.call(close)
        finally:
            self._thread.close()

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        method = getattr(self._made, name)
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        result = await self._thread.call(lambda: method(**arguments))
        return await result if inspect.isawaitable(result) else result
