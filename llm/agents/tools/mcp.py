"""Tools of an MCP server: `mcp:COMMAND` (it speaks over its standard input and output) or
`mcp:http://...` (streamable HTTP).

JSON-RPC, spoken directly: initialize, notifications/initialized, tools/list, tools/call. Each
episode that calls has a session of its own, begun at its first call, so that nothing a server
remembers passes from one to the next. An error that the server answers is text for the model; a
server that dies, or answers no JSON-RPC, is infrastructure.

Source: modelcontextprotocol.io, revision 2025-06-18.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from unirl.errors import UniRLError
from unirl.llm.agents.tools.schema import checked_parameters
from unirl.llm.agents.tools.tool import Call, ToolError, ToolSpec
from unirl.llm.agents.worlds.server import START_SECONDS, ask_now
from unirl.llm.agents.worlds.world import WorldFailed
from unirl.llm.http import HttpClient, HttpFailed

_REVISION = "2025-06-18"
_MAX_LINE = 2**24
_MOST_PAGES = 100
_CLOSE_SECONDS = 2.0


class McpTools:
    """where: a command or a url. Its tools are asked for at once; UniRLError where none come."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._is_url = where.startswith(("http://", "https://"))
        if not self._is_url and not shlex.split(where):
            raise UniRLError(
                "the tool mcp: names no server",
                "it must be mcp:COMMAND or mcp:http://...",
                "name a command that starts one",
            )
        try:
            listed = ask_now(self._listed())
        except (WorldFailed, OSError, TimeoutError) as error:
            raise UniRLError(
                f"the MCP server {where} does not name its tools",
                str(error) or f"it took longer than {START_SECONDS:g} s",
                "start it by hand and look at what it says",
            ) from error
        if not listed:
            raise UniRLError(
                f"the MCP server {where} has no tools",
                "tools/list answers an empty list",
                "look at the server's settings",
            )
        self.specs: Sequence[ToolSpec] = [self._spec(each) for each in listed]

    async def open(self, task: Mapping[str, Any]) -> McpEpisode:
        return McpEpisode(self, [spec.name for spec in self.specs])

    async def close(self) -> None:
        """Each episode lets go of its own."""

    async def session(self) -> McpSession:
        link: _Link = _HttpLink(self._where) if self._is_url else _StdioLink(self._where)
        session = McpSession(self._where, link)
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        return session

    async def _listed(self) -> list[Any]:
        async with asyncio.timeout(START_SECONDS):
            session = await self.session()
            try:
                return await session.list_tools()
            finally:
                await session.close()

    def _spec(self, listed: Any) -> ToolSpec:
        name = listed.get("name") if isinstance(listed, Mapping) else None
        if not isinstance(name, str):
            raise UniRLError(
                f"the MCP server {self._where} lists a tool without a name",
                f"each has a name that is text; it is {str(listed)[:80]}",
                "correct the server",
            )
        parameters = checked_parameters(
            listed.get("inputSchema"), f"the tool {name} of {self._where}"
        )
        return ToolSpec(name, str(listed.get("description") or ""), parameters)


class McpEpisode:
    """One episode's session, begun when it is needed."""

    def __init__(self, tools: McpTools, names: Sequence[str]) -> None:
        self._tools, self._names = tools, names
        self._session: McpSession | None = None
        self._starting = asyncio.Lock()

    def calls(self) -> Mapping[str, Call]:
        return {name: partial(self._call, name) for name in self._names}

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        async with self._starting:
            if self._session is None:
                self._session = await self._tools.session()
        return await self._session.call(name, arguments)


class _Link(Protocol):
    """Carries messages: whole JSON values."""

    async def open(self) -> None: ...

    async def ask(self, message: Mapping[str, Any]) -> Any:
        """The answer to a request; None of a notification."""

    async def close(self) -> None: ...


class McpSession:
    def __init__(self, where: str, link: _Link) -> None:
        self._where, self._link = where, link
        self._ids = itertools.count(1)

    async def start(self) -> None:
        try:
            await self._link.open()
        except (OSError, ValueError) as error:
            raise self._failed("it cannot start", f"{type(error).__name__}: {error}") from error
        about = {"name": "unirl", "version": "1"}
        await self._request(
            "initialize",
            {"protocolVersion": _REVISION, "capabilities": {}, "clientInfo": about},
        )
        await self._ask({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def list_tools(self) -> list[Any]:
        found: list[Any] = []
        cursor: Any = None
        for _ in range(_MOST_PAGES):
            result = await self._request("tools/list", {"cursor": cursor} if cursor else {})
            tools = result.get("tools")
            if not isinstance(tools, list):
                raise self._failed("tools/list names no tools", str(result)[:200])
            found += tools
            cursor = result.get("nextCursor")
            if not cursor:
                break
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            result = await self._request("tools/call", {"name": name, "arguments": arguments})
        except _Refused as error:
            raise ToolError(str(error)) from error
        text = _content(result)
        if result.get("isError"):
            raise ToolError(text)
        return text

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._link.close()

    async def _ask(self, message: Mapping[str, Any]) -> Any:
        try:
            return await self._link.ask(message)
        except (OSError, EOFError, HttpFailed, ValueError) as error:
            what = f"{message['method']} failed"
            raise self._failed(what, f"{type(error).__name__}: {error}") from error

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        answer = await self._ask(message)
        if isinstance(answer, Mapping) and isinstance(answer.get("error"), Mapping):
            error_text = str(answer["error"].get("message") or answer["error"])
            if method != "tools/call":
                raise self._failed(f"{method} was refused", error_text)
            raise _Refused(error_text)
        result = answer.get("result") if isinstance(answer, Mapping) else None
        if not isinstance(result, dict):
            raise self._failed(f"{method} was answered without a result", str(answer)[:200])
        return result

    def _failed(self, what: str, why: str) -> WorldFailed:
        return WorldFailed(
            f"the MCP server {self._where}: {what}", why, "look at the server's log", "mcp"
        )


class _Refused(Exception):
    """The server answered an error: for the model, as its call may have caused it."""


class _StdioLink:
    """A process of its own; one JSON value a line."""

    def __init__(self, command: str) -> None:
        self._argv = shlex.split(command)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[Any, asyncio.Future[Any]] = {}

    async def open(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MAX_LINE,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())

    async def ask(self, message: Mapping[str, Any]) -> Any:
        assert self._process is not None and self._process.stdin is not None
        if self._reader is None or self._reader.done():
            raise EOFError("its process has ended")
        future: asyncio.Future[Any] | None = None
        if "id" in message:
            future = self._waiting[message["id"]] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
            return None if future is None else await future
        finally:
            self._waiting.pop(message.get("id"), None)

    async def close(self) -> None:
        process, self._process = self._process, None
        if self._reader is not None:
            self._reader.cancel()
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await process.wait()
        except TimeoutError:
            pass
        # Also what it has started: all of it is in a session of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        error: Exception = EOFError("its process has ended")
        try:
            while line := await self._process.stdout.readline():
                message = json.loads(line)
                future = self._waiting.get(message.get("id")) if "method" not in message else None
                if future is not None and not future.done():
                    future.set_result(message)
        except (ValueError, AttributeError) as failed:
            error = ValueError(f"it wrote a line that is no JSON-RPC: {failed}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


class _HttpLink:
    """One POST a message; the answer is JSON, or an event stream that holds it."""

    def __init__(self, url: str) -> None:
        self._client = HttpClient(url, {}, section="agent.tools")
        self._headers: dict[str, str] = {"Accept": "application/json, text/event-stream"}

    async def open(self) -> None:
        """The first message opens it."""

    async def ask(self, message: Mapping[str, Any]) -> Any:
        async with aclosing(await self._client.ask("POST", "", message, self._headers)) as answer:
            session = answer.headers.get("mcp-session-id")
            if session:
                self._headers["Mcp-Session-Id"] = session
            if message.get("method") == "initialize":
                self._headers["MCP-Protocol-Version"] = _REVISION
            if "id" not in message:
                return None
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                return json.loads(await answer.whole(_MAX_LINE))
            async for line in answer.lines():
                if line.startswith(b"data:") and line[5:].strip():
                    found = json.loads(line[5:])
                    if isinstance(found, Mapping) and found.get("id") == message["id"]:
                        return found
        raise EOFError("the stream ended without an answer")

    async def close(self) -> None:
        if "Mcp-Session-Id" in self._headers:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await (await self._client.ask("DELETE", "", None, self._headers)).aclose()


def _content(result: Mapping[str, Any]) -> str:
    """The text of a result; of what is no text its kind alone."""
    parts = result.get("content")
    texts = [
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')}]"
        for part in (parts if isinstance(parts, list) else [])
        if isinstance(part, Mapping)
    ]
    if not texts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(texts)
