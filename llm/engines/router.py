"""Several servers as one engine: whatever speaks OpenAI's API, here or in other clusters.

The completions of a prompt go to one server, which shares its work among them; a prompt goes to the
server with the fewest tokens in flight. What may be continued, as a session's turns are, stays with
the server that has its keys and values. A server that does not answer gets nothing more until it
does, and what it had is continued by others with the tokens that have come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unirl.core.weights import Weights
from unirl.errors import Restartable, UniRLError
from unirl.llm.engine import (
    Capabilities,
    Completion,
    EngineConfig,
    EngineFailed,
    PauseMode,
    Request,
)
from unirl.llm.engines.openai.engine import OpenAiEngine
from unirl.llm.http import PAUSES, require_url
from unirl.llm.models.model import ModelConfig

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at the servers and at the file that names them."""
_ANSWER_LOOKS = 5
"""How many times as long an answer may take."""
_TRIES = 2
"""Looks without an answer after which a server counts as gone."""
_MOST_HOMES = 4096
"""Sessions whose server is remembered; of more, those that were not heard of for longest go."""


@dataclass(eq=False)
class _Server:
    url: str
    engine: OpenAiEngine
    is_up: bool = False
    is_leaving: bool = False
    """It is no longer named, and finishes what it has."""
    tokens: int = 0
    """That its requests in flight may still draw."""
    groups: Counter[str] = field(default_factory=Counter)
    """How many requests of each prompt it has."""
    num_silent: int = 0


class Router:
    """Engine (see there). A server that joins gets requests with the next version of the weights,
    which each server proves by itself.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        pauses: Sequence[float] = PAUSES,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._model, self._config, self._pauses = model, config, pauses
        self._look_seconds = look_seconds
        self._servers: dict[str, _Server] = {}
        self._where: dict[str, _Server] = {}
        self._home: OrderedDict[str, _Server] = OrderedDict()
        """By session, the server that drew its last turn."""
        self._aborted: set[str] = set()
        self._version = -1
        self._starting, self._changed = asyncio.Lock(), asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._gone: Counter[str] = Counter()
        """What servers that have left had counted."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            load_weights=any(one.engine.capabilities.load_weights for one in self._up())
        )

    @property
    def version(self) -> int:
        return self._version

    def urls(self) -> list[str]:
        """The servers that are named now. Raises UniRLError for a name that is none."""
        if not self._config.urls_file:
            return list(self._config.urls)
        try:
            text = Path(self._config.urls_file).read_text(encoding="utf-8")
        except OSError as error:
            raise UniRLError(
                f"engine.urls_file {self._config.urls_file} cannot be read: {error.strerror}",
                "it names servers, one URL in each line",
                "write it, or set engine.url",
            ) from error
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        found = list(dict.fromkeys(filter(None, lines)))
        for url in found:
            require_url(url, "engine.urls_file", "engine.api_key_variable")
        return found

    async def start(self) -> None:
        """Wait for the servers that are named; one of them is enough."""
        async with self._starting:
            if self._watcher is not None:
                return
            self._rename()
            ends = time.monotonic() + self._config.timeout_seconds
            while True:
                found = await asyncio.gather(*map(self._look, list(self._servers.values())))
                if self._up():
                    break
                for error in filter(None, found):
                    if isinstance(error, UniRLError) or time.monotonic() > ends:
                        raise error
                if time.monotonic() > ends:
                    raise self._nobody()
                await asyncio.sleep(self._look_seconds)
            self._watcher = asyncio.create_task(self._watch())

    async def generate(self, request: Request) -> Completion:
        group = request.id.rpartition(".")[0] or request.id
        try:
            while True:
                server, number = await self._server_for(group), request.num_left
                if request.may_continue:
                    self._stay(group, server)
                server.tokens += number
                server.groups[group] += 1
                self._where[request.id] = server
                try:
                    done = await server.engine.generate(request)
                except EngineFailed as error:
                    self._lose(server, error)
                    request = replace(request, partial=error.partial or request.partial)
                    continue
                finally:
                    server.tokens -= number
                    server.groups[group] -= 1
                if done.finish != "aborted" or server.is_up or request.id in self._aborted:
                    return done
                request = replace(request, partial=done)
        finally:
            self._where.pop(request.id, None)
            self._aborted.discard(request.id)

    def so_far(self, id: str) -> Completion | None:
        server = self._where.get(id)
        return None if server is None else server.engine.so_far(id)

    async def abort(self, ids: list[str] | None = None) -> None:
        names = list(self._where) if ids is None else [name for name in ids if name in self._where]
        self._aborted.update(names)
        for server in {self._where[name] for name in names}:
            await server.engine.abort([name for name in names if self._where[name] is server])

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "abort":
            self._aborted.update(self._where)
        await asyncio.gather(*(one.engine.pause(mode) for one in self._servers.values()))

    async def resume(self) -> None:
        await asyncio.gather(*(one.engine.resume() for one in self._servers.values()))

    async def load_weights(self, weights: Weights, version: int) -> None:
        """All at a time, each proves it by itself; one that fails is left out until it does."""
        servers = self._up()

        async def load(server: _Server) -> EngineFailed | None:
            try:
                await server.engine.load_weights(weights, version)
            except EngineFailed as error:
                self._lose(server, error)
                return error
            return None

        failures = list(filter(None, await asyncio.gather(*map(load, servers))))
        if len(failures) == len(servers):
            raise failures[0] if failures else self._nobody()
        self._version = version
        self._changed.set()

    async def sleep(self) -> None:
        """Not for servers."""

    async def wake(self) -> None:
        """Not for servers."""

    def stats(self) -> Mapping[str, float]:
        total: Counter[str] = Counter(self._gone)
        for server in self._servers.values():
            total.update(server.engine.stats())
        return {**total, "servers": float(len(self._ready()))}

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*(one.engine.close() for one in self._servers.values()))

    # -- servers -----------------------------------------------------------------------------------

    def _up(self) -> list[_Server]:
        return [one for one in self._servers.values() if one.is_up]

    def _ready(self) -> list[_Server]:
        """Those that draw with the right weights."""
        found = [one for one in self._up() if one.engine.version == self._version]
        return [one for one in found if not one.is_leaving]

    async def _server_for(self, group: str) -> _Server:
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                while not (ready := self._ready()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._nobody() from None
        home = self._home.get(group)
        if home in ready:
            return home
        together = [one for one in ready if one.groups[group] > 0]
        return min(together or ready, key=lambda one: one.tokens)

    def _stay(self, group: str, server: _Server) -> None:
        self._home[group] = server
        self._home.move_to_end(group)
        if len(self._home) > _MOST_HOMES:
            self._home.popitem(last=False)

    def _nobody(self) -> EngineFailed:
        names = ", ".join(self._servers) or "there is none"
        return EngineFailed(
            f"no server of the router answers: {names}",
            f"one must within engine.timeout_seconds, which is {self._config.timeout_seconds:g}",
            "start one, or name others in engine.url or engine.urls_file",
        )

    def _rename(self) -> None:
        """Take on servers that are newly named; let go those that no longer are."""
        names = self.urls()
        for url in names:
            if url not in self._servers:
                self._servers[url] = self._server(url)
        for url, server in self._servers.items():
            if server.is_leaving != (url not in names):
                server.is_leaving = url not in names
                log.info("server %s %s", url, "is to leave" if server.is_leaving else "stays")

    def _server(self, url: str) -> _Server:
        config = replace(self._config, url=url, urls_file="")
        return _Server(url, OpenAiEngine(self._model, config, pauses=self._pauses))

    async def _start(self, server: _Server) -> UniRLError | EngineFailed | None:
        try:
            await server.engine.start()
        except (UniRLError, EngineFailed) as error:
            log.warning("server %s: %s", server.url, error)
            return error
        server.is_up, server.num_silent = True, 0
        log.info("server %s is there", server.url)
        self._changed.set()
        return None

    def _lose(self, server: _Server, why: object) -> None:
        """Its requests end as they are, and are continued by others."""
        if not server.is_up:
            return
        log.warning("server %s is left out: %s", server.url, why)
        server.is_up = False
        self._ending = asyncio.ensure_future(server.engine.close())  # kept, or it might vanish
        # What it computes with when it comes back is not known.
        self._servers[server.url] = self._server(server.url)
        self._servers[server.url].is_leaving = server.is_leaving
        self._gone.update(server.engine.stats())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)
            try:
                self._rename()
            except UniRLError as error:
                log.warning("%s", error)
            looks = map(self._look, list(self._servers.values()))
            for found in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(found, Exception) and not isinstance(found, Restartable | UniRLError):
                    log.error("a server could not be looked at", exc_info=found)

    async def _look(self, server: _Server) -> UniRLError | EngineFailed | None:
        if server.is_leaving and not server.tokens:
            del self._servers[server.url]
            self._gone.update(server.engine.stats())
            await server.engine.close()
            log.info("server %s has left", server.url)
        elif server.is_up:
            there = await server.engine.answers(_ANSWER_LOOKS * self._look_seconds)
            server.num_silent = 0 if there else server.num_silent + 1
            if server.num_silent >= _TRIES:
                self._lose(server, f"it has not answered {_TRIES} times")
        elif await server.engine.answers(_ANSWER_LOOKS * self._look_seconds):
            return await self._start(server)
        return None
