"""HTTP for engines behind servers: JSON and server-sent events over asyncio's streams, with a
deadline on every wait. Source: RFC 9112 (HTTP/1.1), the WHATWG's server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from unirl.core.errors import UniRLError
from unirl.llm.engine import EngineFailed

_LINE = 64 * 2**20
"""Bytes that one line may have: a chunk of a stream is one line."""
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_PAUSES = (0.1, 0.3, 1.0, 2.0)
"""Seconds before each further attempt."""


class BadStatus(Exception):
    """The server answered with an error. body: its beginning."""

    def __init__(self, status: int, body: str) -> None:
        self.status, self.body = status, " ".join(body.split())[:400]
        super().__init__(status, self.body)


class HttpClient:
    """One server. url: http(s)://host[:port][/path], to which paths are appended.

    key_variable: the environment variable that holds a bearer token; "": none is sent.
    """

    def __init__(self, url: str, *, key_variable: str = "", seconds: float = 120.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UniRLError(
                f"engine.url is {url}",
                "it must be http://host:port/v1, or https",
                "http://127.0.0.1:8000/v1 is where vLLM's server listens by itself",
            )
        self.url, self.seconds = url.rstrip("/"), seconds
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._key = _key(key_variable)

    def root(self) -> HttpClient:
        """The same server without /v1: where its own endpoints are."""
        other = object.__new__(HttpClient)
        other.__dict__.update(self.__dict__)
        if self._path.endswith("/v1"):
            other._path = self._path.removesuffix("/v1")
            other.url = self.url.removesuffix("/v1")
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
        connection = await self._retried("POST", path, body, headers, 0.0)
        try:
            yield self._chunks(connection)
        finally:
            connection.close()

    async def _chunks(self, connection: _Connection) -> AsyncIterator[dict[str, Any]]:
        async for line in connection.lines(self.seconds):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                chunk = json.loads(data)
            except ValueError as error:
                raise self._nonsense(data) from error
            if "error" in chunk:
                raise BadStatus(500, json.dumps(chunk["error"]))
            yield chunk

    async def _asked(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], patience: float
    ) -> Any:
        connection = await self._retried(method, path, body, headers, patience)
        try:
            data = await connection.rest(self.seconds)
        finally:
            connection.close()
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except ValueError as error:
            raise self._nonsense(data) from error

    async def _retried(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], patience: float
    ) -> _Connection:
        """A connection whose answer has begun with a good status.

        Raises BadStatus, or EngineFailed after several attempts.
        """
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + patience, 0
        while True:
            failure: Exception
            try:
                return await asyncio.wait_for(
                    self._begin(method, path, body, headers), self.seconds
                )
            except BadStatus as error:
                if error.status not in _RETRIED:
                    raise
                failure = error
            except TimeoutError as error:
                raise EngineFailed(
                    f"{self.url} is silent",
                    f"{path} did not answer within engine.timeout_seconds = {self.seconds:g} s",
                    "look at the server, or raise the limit",
                ) from error
            except (OSError, asyncio.IncompleteReadError) as error:
                failure = error
            if attempt >= len(_PAUSES) and loop.time() >= end:
                if isinstance(failure, BadStatus):
                    raise failure
                raise EngineFailed(
                    f"{self.url} cannot be reached",
                    f"{attempt + 1} attempts failed: {failure}",
                    "start the server, or correct engine.url",
                ) from failure
            await asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1

    async def _begin(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> _Connection:
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._ssl, limit=_LINE
        )
        connection = _Connection(reader, writer)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            told = {
                "Host": f"{self._host}:{self._port}",
                "Connection": "close",
                "Accept": "application/json, text/event-stream",
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **({"Authorization": f"Bearer {self._key}"} if self._key else {}),
                **headers,
            }
            head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            writer.write(f"{method} {self._path}{path} HTTP/1.1\r\n{head}\r\n".encode() + data)
            await writer.drain()
            status = await connection.head()
            if not 200 <= status < 300:
                text = await connection.rest(self.seconds)
                raise BadStatus(status, text.decode(errors="replace"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _nonsense(self, data: bytes) -> EngineFailed:
        return EngineFailed(
            f"{self.url} answers nonsense",
            f"JSON was expected, {data[:80]!r} came",
            "look whether engine.url leads to an OpenAI-compatible server, /v1 included",
        )


class _Connection:
    """One answer, read piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers: dict[str, str] = {}

    async def head(self) -> int:
        """Status and headers."""
        words = (await self._reader.readline()).split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            raise ConnectionError("the answer is not HTTP, or the server hung up")
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            self._headers[name.strip().lower()] = value.strip()
        return int(words[1])

    async def rest(self, seconds: float) -> bytes:
        """All of the body."""
        return b"".join([piece async for piece in self._pieces(seconds)])

    async def lines(self, seconds: float) -> AsyncIterator[bytes]:
        """The body's lines, each as soon as it is whole."""
        held = b""
        async for piece in self._pieces(seconds):
            *whole, held = (held + piece).split(b"\n")
            for line in whole:
                yield line
        if held:
            yield held

    async def _pieces(self, seconds: float) -> AsyncIterator[bytes]:
        chunked = "chunked" in self._headers.get("transfer-encoding", "")
        left = int(self._headers["content-length"]) if "content-length" in self._headers else -1
        while left != 0:
            try:
                async with asyncio.timeout(seconds):
                    piece = await (self._chunk() if chunked else self._reader.read(2**16))
            except TimeoutError as error:
                raise EngineFailed(
                    "a server fell silent in the middle of its answer",
                    f"engine.timeout_seconds allows {seconds:g} s",
                    "look at the server, or raise the limit",
                ) from error
            if not piece:
                if left > 0:
                    raise ConnectionError(f"the server hung up with {left} bytes to go")
                return
            left -= len(piece) if left > 0 else 0
            yield piece

    async def _chunk(self) -> bytes:
        line = await self._reader.readline()
        if not line:
            raise ConnectionError("the server hung up in the middle of its answer")
        size = int(line.split(b";")[0], 16)
        piece = await self._reader.readexactly(size)
        await self._reader.readline()
        return piece

    def close(self) -> None:
        """Hang up: at once, whatever is on its way."""
        self._writer.transport.abort()


def _key(variable: str) -> str:
    if not variable:
        return ""
    if not os.environ.get(variable):
        raise UniRLError(
            f"engine.api_key_variable is {variable}",
            "there must be an environment variable of that name, and it is not set",
            f"export {variable}=..., or leave engine.api_key_variable out",
        )
    return os.environ[variable]
