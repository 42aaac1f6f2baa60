"""How an engine asks its server: repetitions, patience, deadlines, and the chunks of a stream.
Source: the WHATWG's server-sent events.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from unirl.llm.engine import EngineFailed
from unirl.llm.http import (
    Answer,
    BadStatus,
    Http,
    HttpFailed,
    NotConnected,
    bearer,
    require_url,
)

_RETRIED = frozenset({0, 408, 429, 500, 502, 503, 504})
"""Statuses after which a request is sent again; 0: the connection broke."""
_PAUSES = (0.1, 0.3, 1.0, 2.0)
"""Seconds before each further attempt, where the server does not ask for more."""


class HttpClient:
    """One server. url: http(s)://host[:port][/path], to which paths are appended.

    key_variable: the environment variable that holds a bearer token; "": none is sent. section: of
    the config, which errors name: where url, api_key_variable and timeout_seconds are set.
    """

    def __init__(
        self, url: str, *, key_variable: str = "", seconds: float = 120.0, section: str = "engine"
    ) -> None:
        key_setting = f"{section}.api_key_variable"
        require_url(url, f"{section}.url", key_setting)
        self._http = Http(url, bearer(key_variable, key_setting), seconds=seconds)
        self._seconds = seconds
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

    async def post(self, path: str, body: Any = None, *, patience: float = 0.0) -> Any:
        """The answer's JSON; None where there is no body. patience: seconds to wait for a server
        that went away or is busy.
        """
        return await self._asked("POST", path, body, {}, patience)

    async def order(self, path: str, body: Any = None) -> Any:
        """`post` for what changes the server: an order that may have arrived is not repeated."""
        return await self._asked("POST", path, body, {}, 0.0, once=True)

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
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        patience: float,
        *,
        once: bool = False,
    ) -> Any:
        begun = await self._retried(method, path, body, headers, patience, once=once)
        async with aclosing(begun) as answer:
            with self._reading():
                data = await answer.whole()
        return self._json(data) if data.strip() else None

    async def _retried(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        patience: float,
        *,
        once: bool = False,
    ) -> Answer:
        """An answer that has begun with a good status. once: see `order`.

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
                failure = error
            attempt += 1
            may = isinstance(failure, NotConnected) or (not once and failure.status in _RETRIED)
            if not may or (attempt > len(_PAUSES) and loop.time() >= end):
                if isinstance(failure, BadStatus):
                    raise failure
                raise self._lost(failure, attempt) from failure
            usual = _PAUSES[min(attempt, len(_PAUSES)) - 1]
            # A server that is busy says how long, and is heard as far as the deadline allows.
            await asyncio.sleep(max(usual, min(failure.retry_after, self._seconds)))

    def _lost(self, failure: HttpFailed, num_attempts: int) -> EngineFailed:
        """No answer at all."""
        if isinstance(failure, NotConnected):
            return EngineFailed(
                f"{self.url} cannot be reached",
                f"{num_attempts} attempts failed: {failure}",
                f"start the server, or correct {self._section}.url",
            )
        return EngineFailed(
            f"{self.url} hung up",
            f"{num_attempts} attempts failed, the last one: {failure}",
            "look at the server's log",
        )

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
