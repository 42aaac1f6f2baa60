"""Rewards that are functions: of the user's own by `module:function`, and those of UniRL that had
better not run in this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from unirl.errors import UniRLError, format_error
from unirl.imports import load_own
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.rewards.limits import Limits, within
from unirl.llm.rewards.pool import WorkerDied, WorkerPool
from unirl.llm.rewards.reward import as_score, failed, timed_out
from unirl.llm.rewards.worker import wanted
from unirl.llm.tasks.prompts import Prompt, Said

OFFERED = (
    "text", "answer", "prompt", "messages", "info", "task", "num_tokens", "finish", "whole_text",
    "turns", "outcome", "ending",
)  # fmt: skip
"""What a function may name among its arguments. text, num_tokens: what the model wrote itself;
whole_text: with what tools or users said between its turns. Of an episode text is its last answer;
turns, outcome and ending say the rest."""


class PooledReward:
    """A function that runs in worker processes: one that hangs or crashes loses its own sample.

    pool: closed by its owner. settings: further arguments, the same at every call.
    """

    def __init__(
        self,
        function: str,
        pool: WorkerPool,
        timeout_seconds: float,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._function, self._pool, self._seconds = function, pool, timeout_seconds
        self._settings, self._limits = dict(settings or {}), limits

    async def judge(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        if self._limits is not None:
            await self._limits.turn()
        offered = arguments(prompt, text, completion) | self._settings
        try:
            return as_score(await self._pool.call(self._function, offered, self._seconds))
        except TimeoutError as error:
            return timed_out(f"{error}; its process was killed")
        except (WorkerDied, RuntimeError) as error:
            return failed(str(error))


class AsyncReward:
    """An async function of the user's own: it runs on this event loop, and must not block it."""

    def __init__(
        self, function: Callable[..., Awaitable[Any]], timeout_seconds: float, limits: Limits
    ) -> None:
        self._function, self._seconds, self._limits = function, timeout_seconds, limits

    async def judge(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        offered = arguments(prompt, text, completion)

        async def call() -> Any:
            return await self._function(**wanted(self._function, offered))

        async with self._limits.call():
            try:
                return as_score(await within(call(), self._seconds))
            except TimeoutError as error:
                return timed_out(str(error))
            except Exception as error:
                return failed(format_error(error))


def arguments(prompt: Prompt, text: str, completion: Completion) -> dict[str, Any]:
    """What a function may know of a completion: OFFERED, with values that JSON can hold."""
    said = text if isinstance(text, Said) else Said(text, text)
    return {
        "text": str(text),
        "answer": prompt.answer,
        "prompt": prompt.text,
        "messages": [dict(turn) for turn in prompt.messages],
        "info": dict(prompt.info),
        "task": prompt.task,
        "num_tokens": sum(completion.mask),
        "finish": completion.finish,
        "whole_text": said.whole,
        "turns": [dict(turn) for turn in said.turns],
        "outcome": said.outcome,
        "ending": said.ending or completion.finish,
    }


def own_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises UniRLError when there is none, or when it
    needs arguments that are not offered.
    """
    what = f'reward "{name}"'
    function = load_own(name, what)
    if not callable(function):
        raise UniRLError(
            f"{what} is no function",
            f"expected a function of {', '.join(OFFERED[:2])}, found {type(function).__name__}",
            "name a function",
        )
    try:
        wanted(function, dict.fromkeys(OFFERED))
    except TypeError as error:
        raise UniRLError(
            f'{what} has an argument "{error}"',
            f"there are {', '.join(OFFERED)}",
            "rename it, or give it a default",
        ) from None
    except ValueError:  # written in C, without a signature
        raise UniRLError(
            f"{what} does not show its arguments",
            f"it is a {type(function).__name__} without a signature",
            "wrap it in a function of text and answer",
        ) from None
    return function  # type: ignore[no-any-return]


def is_async_function(function: Callable[..., Any]) -> bool:
    """Whether calling it makes a coroutine; so it is for objects with an async __call__."""
    call = getattr(function, "__call__", None)  # noqa: B004  looked into, not asked for
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
