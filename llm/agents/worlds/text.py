"""A user's own environment as a world: `text:module:Class`.

    class Guess:
        def reset(self, task, seed):
            self.number = random.Random(seed).randint(1, 9)
            return "Guess my number from 1 to 9."

        def step(self, text):
            right = text.strip() == str(self.number)
            return ("Right." if right else "Wrong."), float(right), right

Both may be async. What they return as text may also be a list of messages. `step` may return a
fourth value, whether it was truncated, and may be given calls where the class has `tools`, a list
of JSON schemas: its `call(name, arguments)` answers them as `step` does text.
"""

from __future__ import annotations

import inspect
import json
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from unirl.errors import Restartable, UniRLError, format_error
from unirl.imports import is_own, load_own
from unirl.llm.agents.threads import OwnThread
from unirl.llm.agents.worlds.world import Action, Observation, ToolSchema, WorldFailed, answered
from unirl.llm.tasks.task import Message

_STEP = "(text, reward, done) or (text, reward, terminated, truncated)"


class TextEnv:
    """One episode of such an environment; what is not async in it runs in a thread of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._env: Any = None
        self._thread = OwnThread()

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        if self._env is None:
            self._env = await self._call(self._make)
        text = await self._call(self._env.reset, task, seed)
        tools = getattr(self._env, "tools", None)
        return Observation(_messages(text, ""), tools=None if tools is None else tuple(tools))

    async def step(self, action: Action) -> Observation:
        if isinstance(action, str):
            result = await self._call(self._env.step, action)
        elif hasattr(self._env, "call"):
            result = await self._call(self._env.call, action.name, action.arguments)
        else:
            text = f"Error: nothing can be called here; {action.name} was."
            return Observation(answered(action, text), is_invalid=True)
        if not (isinstance(result, tuple) and len(result) in (3, 4)):
            raise _broken(self._env, f"step must return {_STEP}", f"{result!r:.80}")
        text, reward, *ends = result
        if not (reward is None or isinstance(reward, numbers.Real)):
            raise _broken(self._env, "a reward must be a number or None", f"{reward!r:.80}")
        return Observation(
            _messages(text, action),
            None if reward is None else float(reward),
            bool(ends[0]),
            len(ends) > 1 and bool(ends[1]),
        )

    async def close(self) -> None:
        close = getattr(self._env, "close", None)
        try:
            if close is not None:
                await self._call(close)
        finally:
            self._thread.close()

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            result = await self._thread.call(lambda: function(*args))
            return await result if inspect.isawaitable(result) else result
        except Restartable:
            raise
        except Exception as error:
            raise WorldFailed(
                format_error(error), "what an environment raises ends its episode", "fix it", "code"
            ) from error


class TextWorld:
    def __init__(self, name: str, options: Mapping[str, str]) -> None:
        self.name = f"text:{name}"
        if not is_own(name):
            raise UniRLError(
                f'the world "{self.name}" names no class',
                'it must be written text:module:Class, as "text:my.games:Guess"',
                "name the module and the class in it",
            )
        found = load_own(name, f'the world "{self.name}"')
        missing = [each for each in ("reset", "step") if not callable(getattr(found, each, None))]
        if missing or not callable(found):
            raise UniRLError(
                f'the world "{self.name}" has no {" and no ".join(missing)}',
                "it must be a class with reset(task, seed) and step(text)",
                f"define them in {name}",
            )
        self._class = found
        self._options = {key: _value(text) for key, text in options.items()}
        try:
            inspect.signature(found).bind(**self._options)
        except TypeError as error:
            raise UniRLError(
                f'the world "{self.name}" cannot be made',
                f"it is called with agent.options {self._options}: {error}",
                "change agent.options to what its __init__ takes",
            ) from error

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        tools = getattr(self._class, "tools", ())
        return tuple(tools) if isinstance(tools, list | tuple) else ()

    def __call__(self) -> TextEnv:
        return TextEnv(lambda: self._class(**self._options))

    def tasks(self, split: str) -> None:
        return None


def _messages(said: Any, action: Action) -> tuple[Message, ...]:
    if isinstance(said, str):
        return answered(action, said)
    if isinstance(said, list | tuple) and all(isinstance(each, Mapping) for each in said):
        return tuple(said)
    raise WorldFailed(
        f"an environment said {said!r:.80}",
        "it must be text or a list of messages",
        "fix it",
        "code",
    )


def _broken(env: Any, rule: str, got: str) -> WorldFailed:
    where = inspect.getsourcefile(type(env)) or type(env).__module__
    return WorldFailed(
        f"{type(env).__name__} in {where}", f"{rule}, and returned {got}", "fix it", "code"
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
