"""Sessions of a real engine behind an endpoint, its loop in a thread, as an actor has them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.llm.agents.chat_tokenizer import chat_model, chat_tokenizer
from unirl.llm.agents.bridge import Bridge
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.session import Draw, Session
from unirl.llm.endpoint.server import Endpoint
from unirl.llm.engine import Completion, Request, SamplingConfig
from unirl.llm.engines.hf.engine import HfEngine

TOKENIZER = chat_tokenizer()
CONTEXT = 1 << 17
ROOMY = AgentConfig(max_turns=1 << 20, max_episode_tokens=1 << 30)


class Hosted:
    """An engine, sessions of it, and what was asked of it."""

    def __init__(self, max_tokens: int = 12, **options: Any) -> None:
        torch.set_num_threads(1)
        self.loop = asyncio.new_event_loop()
        self.engine = HfEngine(None, loaded=(chat_model(TOKENIZER, context=CONTEXT), TOKENIZER))  # type: ignore[arg-type]
        self.bridge, self.max_tokens = Bridge(TOKENIZER), max_tokens
        self.endpoint = Endpoint(**options)
        self.requests: list[Request] = []
        self.sessions: list[Session] = []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    async def draw(self, request: Request) -> Completion:
        self.requests.append(request)
        return await self.engine.generate(request)

    def open(self, draw: Draw | None = None, config: AgentConfig = ROOMY) -> tuple[Session, str]:
        number = len(self.sessions)
        session = Session(
            f"s{number}",
            draw or self.draw,
            self.bridge,
            config,
            SamplingConfig(max_tokens=self.max_tokens),
            seed=number,
            context=CONTEXT,
        )
        self.sessions.append(session)
        return session, self.endpoint.open(session, self.loop)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def start(self) -> None:
        self._thread.start()
        self.endpoint.start()

    def close(self) -> None:
        self.endpoint.close()
        self.run(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextlib.contextmanager
def hosted(**options: Any) -> Iterator[Hosted]:
    one = Hosted(**options)
    one.start()
    try:
        yield one
    finally:
        one.close()


def scripted(*texts: str) -> Callable[[Request], Any]:
    """Draws these texts, which a model from scratch would not say."""
    left = list(texts)

    async def draw(request: Request) -> Completion:
        tokens = (*TOKENIZER.encode(left.pop(0), add_special_tokens=False), TOKENIZER.eos_token_id)
        return Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")

    return draw
