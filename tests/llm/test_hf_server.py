"""Engine hf behind HTTP, and the engine that asks it: tokens, log-probabilities and versions are
those that a rollout beside the model would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("starlette", reason="the server needs the extra agents")
pytest.importorskip("uvicorn", reason="the server needs the extra agents")
pytest.importorskip("httpx2", reason="servers are asked through it")

import httpx2

from tests.llm.agents.chat_tokenizer import chat_model, chat_tokenizer
from unirl.errors import UniRLError
from unirl.llm.engine import EngineConfig, Request, SamplingConfig
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.engines.hf.server import TokenServer
from unirl.llm.engines.openai.engine import OpenAiEngine
from unirl.llm.models.model import ModelConfig, flat_weights

KEY = "a secret of the tests"
TOKENIZER = chat_tokenizer()


def local(seed: int = 0) -> HfEngine:
    return HfEngine(None, loaded=(chat_model(TOKENIZER, seed), TOKENIZER))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[HfEngine, str]]:
    engine, listening = local(), socket.create_server(("127.0.0.1", 0))
    url, up = f"http://127.0.0.1:{listening.getsockname()[1]}/v1", asyncio.Event()
    serving = asyncio.ensure_future(TokenServer(engine, "tiny", KEY).serve(listening, up.set))
    await asyncio.wait_for(up.wait(), 20)
    try:
        yield engine, url
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def client(url: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> OpenAiEngine:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    config = EngineConfig(
        kind="openai", url=url, api_key_variable="ENGINE_KEY", timeout_seconds=20.0,
        options={"served_model_name": "tiny"}, **{"probe_versions": 0, **settings},
    )  # fmt: skip
    return OpenAiEngine(ModelConfig(path="tiny"), config)


def request(number: int, max_tokens: int = 20) -> Request:
    return Request(f"r{number}", (3, 4, 5), SamplingConfig(max_tokens=max_tokens), seed=number)


def test_what_is_drawn_there_is_what_would_be_drawn_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        here = local()
        async with served() as (_, url):
            there = client(url, monkeypatch)
            await there.start()
            wanted = await asyncio.gather(*(here.generate(request(i)) for i in range(6)))
            found = await asyncio.gather(*(there.generate(request(i)) for i in range(6)))
            assert [each.tokens for each in found] == [each.tokens for each in wanted]
            assert [each.finish for each in found] == [each.finish for each in wanted]
            for one, other in zip(found, wanted, strict=True):
                assert one.logp == pytest.approx(other.logp, abs=1e-5)
            await there.close()
        await here.close()

    asyncio.run(main())


def test_new_weights_arrive_and_each_token_has_the_version_that_drew_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        new = flat_weights(chat_model(TOKENIZER, seed=1))
        async with served() as (engine, url):
            one, other = (client(url, monkeypatch, probe_versions=1) for _ in range(2))
            for each in (one, other):
                await each.start()
            assert one.capabilities.load_weights
            await one.load_weights(flat_weights(engine.generation.model), 0)  # type: ignore[union-attr]
            drawing = asyncio.ensure_future(other.generate(request(0, 400)))
            swaps = 0
            while not drawing.done():
                swaps += 1
                await one.load_weights(new, swaps)
                await asyncio.sleep(0.05)
            done = await drawing
            versions = list(done.version)
            # Neither cut nor asked again: the other client knows nothing of the swaps.
            assert versions == sorted(versions) and len(set(versions)) > 2
            assert engine.version == one.version == swaps
            arrivals = 0
            load = engine.load_weights

            async def count(weights: Any, version: int) -> None:
                nonlocal arrivals
                arrivals += 1
                await load(weights, version)

            engine.load_weights = count  # type: ignore[method-assign]
            await other.load_weights(new, swaps)
            assert arrivals == 0  # it has them
            assert all(
                torch.equal(value, new[name])
                for name, value in flat_weights(engine.generation.model).items()  # type: ignore[union-attr]
            )
            drawn = await other.generate(request(1))
            assert set(drawn.version) == {swaps}
            for each in (one, other):
                await each.close()

    asyncio.run(main())


def test_an_aborted_request_ends_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served() as (engine, url):
            there = client(url, monkeypatch)
            await there.start()
            drawing = asyncio.ensure_future(there.generate(request(0, 3000)))
            while (have := there.so_far("r0")) is None or not have.tokens:
                await asyncio.sleep(0.01)
            await there.abort()
            cut = await drawing
            assert cut.finish == "aborted" and 0 < len(cut.tokens) < 3000
            async with asyncio.timeout(10):
                while engine.stats()["running"]:
                    await asyncio.sleep(0.01)
            short = Request("r1", (3, 4, 5), SamplingConfig(max_tokens=len(cut.tokens) + 5), 0, cut)
            whole = await there.generate(short)
            assert whole.tokens[: len(cut.tokens)] == cut.tokens
            await there.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "content", "key", "status", "says"),
    [
        ("GET", "/v1/models", b"", "", 401, "the key"),
        ("POST", "/unirl/weights?version=1", b"", "other", 401, "the key"),
        ("POST", "/unirl/weights?version=x", b"", KEY, 400, "whole number"),
        ("POST", "/unirl/weights?version=1", b"no", KEY, 400, "safetensors"),
        ("POST", "/unirl/weights?version=1", b"0" * 20_000_000, KEY, 400, "larger"),
        ("POST", "/v1/completions", b"[" * 9000, KEY, 400, "JSON"),
        ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1}', KEY, 400, "token ids"),
        ("POST", "/v1/completions", b'{"prompt": [1]}', KEY, 400, "max_tokens"),
        ("POST", "/v1/completions", b'{"prompt": [1], "max_tokens": -1}', KEY, 400, "max_tokens"),
        ("POST", "/v1/completions", b'{"prompt": [9999999], "max_tokens": 1}', KEY, 400, "model"),
        ("POST", "/v1/completions", b'{"prompt": [[1, -2]], "echo": true}', KEY, 400, ">= 0"),
    ],
)
def test_bad_input_is_refused(
    method: str, path: str, content: bytes, key: str, status: int, says: str
) -> None:
    async def main() -> None:
        async with served() as (_, url), httpx2.AsyncClient(timeout=20) as plain:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            where = url.removesuffix("/v1") + path
            answer = await plain.request(method, where, content=content, headers=headers)
            assert answer.status_code == status, answer.text
            assert says in answer.json()["error"]["message"]

    asyncio.run(main())


def test_an_engine_is_not_served_without_a_key() -> None:
    with pytest.raises(UniRLError, match="without a key"):
        TokenServer(local(), "tiny", "")
