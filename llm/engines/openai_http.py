"""How an engine asks its server: repetitions, patience, deadlines, and the chunks of a stream.
Source: the WHATWG's server-sent events.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

from unirl.core.errors import UniRLError
from unirl.llm.engine import EngineFailed
from unirl.llm.http import Answer, BadStatus, Http, HttpFailed

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_PAUSES = (0.1, 0.3, 1.0, 2.0)
"""Seconds before each further attempt."""


class HttpClient:
    """One server. url: http(s)://host[:port][/path], to which paths are appended.

    key_variable: the environment variable that holds a bearer token; "": none is sent. section: of
    the config, which errors name: where url, api_key_variable and timeout_seconds are set.
    """

    def __init__(
        self, url: str, *, key_variable: str = "", seconds: float = 120.0, section: str = "engine"
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UniRLError(
                f"{section}.url is {url}",
                "it must be http://host:port/v1, or https",
                "http://127.0.0.1:8000/v1 is where vLLM's server listens by itself",
            )
        key = _key(key_variable, section)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http, self._seconds = Http(url, headers, seconds=seconds), seconds
        self._section = section

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._http.url

    def root(self) -> HttpClient:
        """The same server without /v1: where its own endpoints are."""
        other = copy.copy(self)
        other._http = self._http.at(self.url.removesuffix("/v1"))
        return other

    async def get(self, path: str, *, patience: float = 0.0) -> Any:
        """The answer's JSON. patience: seconds to wait for a server that is not there yet."""
        return await self._asked("GET", path, None, {}, patience)

    async def post(
        self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The answer's JSON; None where there is no body."""
        return await self._asked("POST", path, body, headers or {}, 0.0)

    @asynccontextmanager
    async def events(
        self, path: str, body: Any, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The chunks of a stream; leaving it cuts the connection, which ends the request."""
        async with aclosing(await self._retried("POST", path, body, headers, 0.0)) as answer:
            yield self._chunks(answer)

    async def _chunks(self, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        with self._reading():
            async for line in answer.lines():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = self._json(data)
                if "error" in chunk:
                    raise BadStatus(500, json.dumps(chunk["error"]))
                yield chunk

    async def _asked(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], patience: float
    ) -> Any:
        async with aclosing(await self._retried(method, path, body, headers, patience)) as answer:
            with self._reading():
                data = await answer.whole()
        return self._json(data) if data.strip() else None

    async def _retried(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], patience: float
    ) -> Answer:
        """An answer that has begun with a good status.

        Raises BadStatus, or EngineFailed after several attempts.
        """
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + patience, 0
        while True:
            failure: HttpFailed
            try:
                return await self._http.ask(method, path, body, headers)
            except TimeoutError as error:
                raise EngineFailed(
                    f"{self.url} is silent",
                    f"{path} did not answer within {self._section}.timeout_seconds, "
                    f"{self._seconds:g} s",
                    "look at the server, or raise the limit",
                ) from error
            except HttpFailed as error:
                if isinstance(error, BadStatus) and error.status not in _RETRIED:
                    raise
                failure = error
            if attempt >= len(_PAUSES) and loop.time() >= end:
                if isinstance(failure, BadStatus):
                    raise failure
                raise EngineFailed(
                    f"{self.url} cannot be reached",
                    f"{attempt + 1} attempts failed: {failure}",
                    f"start the server, or correct {self._section}.url",
                ) from failure
            await asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What may befall an answer in its middle, as EngineFailed."""
        try:
            yield
        except BadStatus:
            raise
        except HttpFailed as error:
            raise EngineFailed(
                f"{self.url} hung up", str(error), "look at the server's log"
            ) from error
        except TimeoutError as error:
            raise EngineFailed(
                f"{self.url} fell silent in the middle of its answer",
                f"{self._section}.timeout_seconds allows {self._seconds:g} s",
                "look at the server, or raise the limit",
            ) from error

    def _json(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise EngineFailed(
                f"{self.url} answers nonsense",
                f"JSON was expected, {data[:80]!r} came",
                f"look whether {self._section}.url leads to an OpenAI-compatible server, "
                "/v1 included",
            ) from error


def _key(variable: str, section: str) -> str:
    if not variable:
        return ""
    if not os.environ.get(variable):
        raise UniRLError(
            f"{section}.api_key_variable is {variable}",
            "there must be an environment variable of that name, and it is not set",
            f"export {variable}=..., or leave {section}.api_key_variable out",
        )
    return os.environ[variable]
