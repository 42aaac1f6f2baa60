"""`unirl serve`: the endpoint alone, over engine hf with a model of a folder or of a run."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.make import make_bridge
from unirl.llm.agents.session import Session
from unirl.llm.endpoint.server import Endpoint, Host
from unirl.llm.engine import EngineConfig, SamplingConfig
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.models.model import ModelConfig, load_tokenizer

log = logging.getLogger(__name__)

_MAX_SESSIONS = 256
_NO_BUDGET = AgentConfig(max_turns=1 << 30, max_episode_tokens=1 << 30)
Newest = Callable[[], tuple[int, Any] | None]
"""Version and weights of what is to be served from now on; None: what is served already."""


@dataclass(frozen=True)
class Serving:
    host: str
    port: int
    key: str
    """What clients must send; "": nothing."""
    max_tokens: int
    temperature: float


class Sessions:
    """One for each X-Session-ID, the least recently used is forgotten; without one, each request is
    a session of its own.
    """

    def __init__(self, key: str, make: Callable[[str], Session]) -> None:
        self._key, self._make = key, make
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()
        self._count = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    def find(self, key: str, name: str) -> Host | None:
        if self._key and not hmac.compare_digest(key.encode(), self._key.encode()):
            return None
        assert self.loop is not None
        with self._lock:
            self._count += 1
            if not name:
                return Host(self._make(f"r{self._count}"), self.loop)
            if name not in self._known:
                self._known[name] = self._make(f"s{self._count}")
            self._known.move_to_end(name)
            while len(self._known) > _MAX_SESSIONS:
                self._known.popitem(last=False)
            return Host(self._known[name], self.loop)


async def serve(
    model: ModelConfig,
    serving: Serving,
    newest: Newest,
    ready: Callable[[Endpoint], None],
    *,
    agent: AgentConfig | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> None:
    """Until it is cancelled. newest: asked every second. ready: called when it is served. agent:
    what a run was trained with, whose calls are written and whose tools are described alike.
    """
    settings = _NO_BUDGET
    if agent is not None:
        settings = replace(settings, calls=agent.calls, describe_tools=agent.describe_tools)
    bridge = make_bridge(settings, load_tokenizer(model), template_options or {})
    engine = HfEngine(model, EngineConfig())
    sampling = SamplingConfig(temperature=serving.temperature, max_tokens=serving.max_tokens)
    context = 0

    def make(name: str) -> Session:
        return Session(
            name, engine.generate, bridge, settings, sampling,
            seed=int.from_bytes(name.encode()[-6:], "little"), context=context, roots="all",
        )  # fmt: skip

    sessions = Sessions(serving.key, make)
    sessions.loop = asyncio.get_running_loop()
    endpoint = Endpoint(
        host=serving.host, port=serving.port, takes_sampling=True, find=sessions.find
    )
    try:
        await engine.start()
        assert engine.generation is not None
        context = engine.generation.context
        await _take(engine, newest)
        endpoint.start()
        ready(endpoint)
        while True:
            await asyncio.sleep(1.0)
            await _take(engine, newest)
    finally:
        endpoint.close()
        await engine.close()


async def _take(engine: HfEngine, newest: Newest) -> None:
    found = newest()
    if found is None:
        return
    version, weights = found
    await engine.pause("keep")
    await engine.load_weights(weights, version)
    await engine.resume()
    log.info("weights of step %d are served", version)
