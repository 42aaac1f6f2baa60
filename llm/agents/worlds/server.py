"""What a world's server is asked over HTTP before a run's first episode, with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from unirl.errors import UniRLError, suggestion
from unirl.llm.http import BadStatus, HttpClient

T = TypeVar("T")
START_SECONDS = 20.0
"""In which a server must answer at the start of a run."""


class NoRoute(Exception):
    """The server has no such route, or says that it does not implement it."""


class Server:
    """world: its name, for messages."""

    def __init__(self, world: str, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise UniRLError(
                f'the world "{world}" has no address',
                "it must be a url with a host and no password in it",
                f"{world.partition(':')[0]}:http://127.0.0.1:8000 is one",
            )
        self._world = world
        self._client = HttpClient(
            url,
            {},
            seconds=START_SECONDS,
            pauses=(0.1, 0.4),
            section="agent.world",
            failure=self._failure,
        )

    def get(self, path: str) -> Any:
        return ask_now(self._asked(self._client.get_json(path), path))

    def post(self, path: str, body: Any) -> Any:
        return ask_now(self._asked(self._client.post_json(path, body), path))

    async def _asked(self, answer: Coroutine[Any, Any, T], path: str) -> T:
        try:
            return await answer
        except BadStatus as error:
            if error.status in (404, 405, 501):
                raise NoRoute(path) from error
            raise UniRLError(
                f'the world "{self._world}" does not answer {path}',
                str(error),
                "look at the server's log",
            ) from error

    def _failure(self, what: str, rule: str, remedy: str) -> UniRLError:
        remedy = remedy.replace("agent.world.url", "agent.world")
        return UniRLError(f'the world "{self._world}": {what}', rule, remedy)


def ask_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result, also where an event loop is running already: in a thread with one of its own."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(coroutine))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def require_options(world: str, options: Mapping[str, str], known: Sequence[str]) -> None:
    for key in options:
        if key not in known:
            raise UniRLError(
                f'the world "{world}" has no option "{key}"',
                f"it has {', '.join(known) or 'none'}",
                suggestion(key, known) or f"remove agent.options.{key}",
            )
