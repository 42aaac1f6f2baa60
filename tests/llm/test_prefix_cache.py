"""The embedded engine computes of a prompt only what no ended sequence began with, and draws what
it draws without that.
"""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the engine runs transformers' models")

from unirl.llm.engine import Completion, EngineConfig, Request, SamplingConfig  # noqa: E402
from unirl.llm.engines.hf.engine import HfEngine  # noqa: E402
from unirl.llm.engines.hf.kept import PrefixCache  # noqa: E402
from unirl.llm.engines.hf.kv_cache import CacheShape, KeyValueCache  # noqa: E402
from unirl.llm.models.model import ModelConfig, flat_weights  # noqa: E402
from unirl.llm.models.tiny import tiny_model, tiny_tokenizer  # noqa: E402

SMALL = {"width": 32, "layers": 2, "heads": 4}


def _model(seed: int = 0) -> Any:
    model = tiny_model(seed, **SMALL).double()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def _windowed() -> Any:
    settings = transformers.MistralConfig(
        vocab_size=74, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        sliding_window=7, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(settings).double().eval()


def _engine(model: Any = None, **settings: Any) -> HfEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    config = EngineConfig(device="cpu", **settings)
    return HfEngine(ModelConfig(), config, loaded=(model or _model(), tokenizer))


def _request(name: str, prompt: tuple[int, ...], max_tokens: int = 5, seed: int = 0) -> Request:
    return Request(name, prompt, SamplingConfig(max_tokens=max_tokens), seed, may_continue=True)


def _said(seed: int, tokens: int) -> tuple[int, ...]:
    random_ = random.Random(seed)
    return tuple(random_.randrange(4, 70) for _ in range(tokens))


async def _talk(engine: HfEngine, number: int, turns: int = 6) -> list[Completion]:
    """An episode of its own lengths, whose first prompt is that of each second one."""
    prompt, found = _said(number % 2, 9), []
    for i in range(turns):
        request = _request(f"{number}.{i}", prompt, 3 + (number + i) % 4, seed=100 * number + i)
        found.append(await engine.generate(request))
        prompt += found[-1].tokens + _said(1000 * number + i, 1 + (3 * number + 5 * i) % 11)
    return found


def _episodes(engine: HfEngine, number: int = 8) -> tuple[list[Completion], dict[str, float]]:
    async def main() -> tuple[list[Completion], dict[str, float]]:
        found = await asyncio.gather(*(_talk(engine, i) for i in range(number)))
        return [one for each in found for one in each], dict(engine.stats())

    return asyncio.run(main())


@pytest.mark.parametrize("make", [_model, _windowed])
@pytest.mark.parametrize("max_sequences", [256, 3])
def test_it_draws_what_an_engine_without_it_draws(make: Any, max_sequences: int) -> None:
    model = make()
    kept, stats = _episodes(_engine(copy.deepcopy(model), max_sequences=max_sequences))
    plain, without = _episodes(_engine(model, max_sequences=max_sequences, prefix_cache_gib=0.0))
    for one, other in zip(kept, plain, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.logp, other.logp, atol=1e-9, rtol=0)
    assert without["reused_tokens"] == 0 < stats["reused_tokens"]
    computed = stats["prefilled_tokens"] + stats["reused_tokens"]
    assert computed >= without["prefilled_tokens"] > 2 * stats["prefilled_tokens"]


def test_a_turn_computes_what_is_new_and_the_last_token_drawn() -> None:
    async def main() -> None:
        engine = _engine()
        first = await engine.generate(_request("a", _said(0, 9)))
        assert engine.stats()["prefilled_tokens"] == 9
        longer = _said(0, 9) + first.tokens + _said(1, 4)
        await engine.generate(_request("b", longer))
        assert engine.stats()["prefilled_tokens"] == 9 + 1 + 4
        await engine.generate(_request("c", longer[:-2] + _said(2, 6)))  # another end
        assert engine.stats()["prefilled_tokens"] == 9 + 5 + 6

    asyncio.run(main())


def test_equal_prompts_are_computed_once_behind_a_kept_beginning_too() -> None:
    async def main(gib: float) -> tuple[list[Completion], float]:
        engine = _engine(prefix_cache_gib=gib)
        await engine.generate(_request("a", _said(0, 9)))
        before = engine.stats()["prefilled_tokens"]
        prompts = [_said(0, 9) + _said(1, 4)] * 3 + [_said(0, 9) + _said(2, 7)] * 2
        prompts.insert(1, _said(3, 6))
        requests = [_request(f"r{i}", each, seed=i) for i, each in enumerate(prompts)]
        found = await asyncio.gather(*map(engine.generate, requests))
        return found, engine.stats()["prefilled_tokens"] - before

    (kept, few), (plain, many) = asyncio.run(main(1.0)), asyncio.run(main(0.0))
    assert [one.tokens for one in kept] == [one.tokens for one in plain]
    assert few == 4 + 7 + 6 and many == 13 + 16 + 6


def test_nothing_of_older_weights_is_used_for_a_new_request() -> None:
    async def main() -> None:
        new = _model(1)
        engine = _engine()
        ended = await engine.generate(_request("ended", _said(0, 9)))
        flying = asyncio.ensure_future(engine.generate(_request("flying", _said(1, 9), 20)))
        while engine.stats()["generated_tokens"] < 10:
            await asyncio.sleep(0)
        await engine.pause()
        await engine.load_weights(flat_weights(new), 1)
        await engine.resume()
        swapped = await flying
        assert set(swapped.version) == {-1, 1}
        fresh = _engine(new)
        for i, (prompt, one) in enumerate(((_said(0, 9), ended), (_said(1, 9), swapped))):
            request = _request(f"later{i}", prompt + one.tokens + _said(2, 4), 8)
            before = engine.stats()["prefilled_tokens"]
            later, expected = await engine.generate(request), await fresh.generate(request)
            assert engine.stats()["prefilled_tokens"] == before + len(request.prompt)
            assert later.tokens == expected.tokens
            torch.testing.assert_close(later.logp, expected.logp, atol=1e-9, rtol=0)

    asyncio.run(main())


def test_sleep_gives_its_memory_back_and_what_nothing_follows_is_not_kept() -> None:
    async def main() -> None:
        engine = _engine()
        await engine.generate(Request("once", _said(0, 9), SamplingConfig(max_tokens=5), 0))
        assert engine.generation is not None and not len(engine.generation.prefixes)
        await engine.generate(_request("turn", _said(0, 9)))
        assert engine.generation.prefixes.num_bytes == 2 * 2 * 2 * 13 * 8 * 8
        await engine.sleep()
        assert engine.generation.prefixes.num_bytes == len(engine.generation.prefixes) == 0

    asyncio.run(main())


def test_it_keeps_within_its_bytes_what_was_used_last() -> None:
    cache = KeyValueCache(CacheShape(2, 3, 4), torch.float32, torch.device("cpu"))
    cache.reserve(1, 64, used_rows=0, used_positions=0)
    prefixes = PrefixCache(3 * cache.bytes_of(10))
    a, b, c, d = (_said(i, 10) for i in range(4))
    for tokens in (a, b, c):
        prefixes.keep(tokens, cache, 0)
    assert prefixes.look_up((*a, 1)).num_kept == 10
    prefixes.keep(d, cache, 0)
    found = [prefixes.look_up((*tokens, 1)).num_kept for tokens in (a, b, c, d)]
    assert found == [10, 0, 10, 10] and prefixes.num_bytes == 3 * cache.bytes_of(10)
    prefixes.keep(a + b, cache, 0)  # in place of its beginning, and of what was used longest ago
    assert [prefixes.look_up((*tokens, 1)).num_kept for tokens in (a, c, d)] == [10, 0, 10]
    prefixes.keep(a, cache, 0)
    assert len(prefixes) == 2
    prefixes.keep(_said(5, 40), cache, 0)
    assert len(prefixes) == 2, "larger than all of it"
    assert prefixes.look_up(a).num_kept == 9, "of one token the logits are still wanted"
