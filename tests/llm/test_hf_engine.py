"""The embedded engine generates what a plain forward pass says, whatever else is in flight."""

import asyncio
import copy
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.errors import UniRLError
from unirl.llm.engine import (
    Completion,
    EngineConfig,
    EngineFailed,
    PauseMode,
    Request,
    SamplingConfig,
)
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.models.model import ModelConfig, flat_weights, load_model, load_tokenizer

transformers = pytest.importorskip("transformers", reason="the engine runs transformers' models")

from unirl.llm.models.tiny import tiny_model, tiny_tokenizer  # noqa: E402

TOKENIZER = tiny_tokenizer()
TEXTS = ("12>", "hello world>", "7+8=", "12>", "a", "the quick brown fox jumps over it")
SMALL = {"width": 32, "layers": 2, "heads": 4}


def _prompt(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def _model(seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: Any) -> Any:
    return tiny_model(seed, **{**SMALL, **sizes}).to(dtype)


def _engine(model: Any = None, *, endless: bool = False, **settings: Any) -> HfEngine:
    """endless: no token ends a completion."""
    model, tokenizer = model or _model(), tiny_tokenizer()
    if endless:
        tokenizer.eos_token = None
        model.config.eos_token_id = model.generation_config.eos_token_id = None
    config = EngineConfig(device="cpu", **settings)
    return HfEngine(ModelConfig(), config, loaded=(model, tokenizer))


def _requests(texts: Sequence[str], *, first: int = 0, **sampling: Any) -> list[Request]:
    settings = SamplingConfig(**{"max_tokens": 24, **sampling})
    return [
        Request(f"r{index}", _prompt(text), settings, seed=index)
        for index, text in enumerate(texts, first)
    ]


async def _generate(engine: HfEngine, requests: Sequence[Request]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def _all(requests: Sequence[Request], engine: HfEngine | None = None) -> list[Completion]:
    result: list[Completion] = _run(_generate(engine or _engine(), requests))
    return result


def _plain_logp(
    model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0
) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logp = (logits.double() / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]


async def _until(engine: HfEngine, tokens: int) -> None:
    """Let it run until it has generated so many tokens."""
    while engine.stats()["generated_tokens"] < tokens:
        await asyncio.sleep(0)


def test_greedy_completions_equal_those_of_transformers_generate() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    for request, got in zip(
        _requests(TEXTS, temperature=0.0),
        _all(_requests(TEXTS, temperature=0.0), _engine(model)),
        strict=True,
    ):
        ids = torch.tensor([request.prompt])
        expected = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert got.tokens == tuple(expected[0, len(request.prompt) :].tolist())
        assert got.logp == (0.0,) * len(got.tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_logp_of_drawn_tokens_equals_a_plain_forward_pass(
    temperature: float, dtype: torch.dtype, bound: float
) -> None:
    model = _model(dtype=dtype, width=64, layers=4)
    plain = copy.deepcopy(model)
    requests = _requests(TEXTS * 3, temperature=temperature, max_tokens=40)
    for request, got in zip(requests, _all(requests, _engine(model)), strict=True):
        expected = _plain_logp(plain, request.prompt, got.tokens, temperature)
        assert (expected - torch.tensor(got.logp, dtype=torch.float64)).abs().max() <= bound


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_other_families_and_sliding_windows_equal_a_plain_forward_pass(kind: str) -> None:
    extra: dict[str, Any] = {"sliding_window": 5} if kind == "Mistral" else {"head_dim": 16}
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=74,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=2,
        pad_token_id=0,
        **extra,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).double().eval()
    plain = copy.deepcopy(model)
    requests = _requests(TEXTS)
    for request, got in zip(requests, _all(requests, _engine(model)), strict=True):
        expected = _plain_logp(plain, request.prompt, got.tokens)
        torch.testing.assert_close(
            torch.tensor(got.logp, dtype=torch.float64), expected, atol=1e-9, rtol=0
        )


def test_a_completion_is_the_same_alone_and_among_others() -> None:
    requests = _requests(TEXTS * 4)
    together = _all(requests)
    crowded = _all(requests, _engine(max_sequences=3))
    alone = [_all([request])[0] for request in requests]
    for one, two, three in zip(together, crowded, alone, strict=True):
        assert one.tokens == two.tokens == three.tokens
        assert one.finish == two.finish == three.finish
        torch.testing.assert_close(one.logp, three.logp, atol=1e-9, rtol=0)
        torch.testing.assert_close(two.logp, three.logp, atol=1e-9, rtol=0)
    assert len({one.tokens for one in together}) == len(together)


def test_sharing_a_prompt_changes_nothing_and_computes_it_once() -> None:
    requests = _requests(["12>"] * 8 + ["7+8="])
    engine = _engine()
    shared = _all(requests, engine)
    assert engine.stats()["prefilled_tokens"] == 3 + 4
    assert engine.stats()["prompt_tokens"] == 8 * 3 + 4
    assert [one.tokens for one in shared] == [_all([request])[0].tokens for request in requests]


def test_completions_are_the_same_in_every_run() -> None:
    assert _all(_requests(TEXTS * 2)) == _all(_requests(TEXTS * 2))


def test_first_tokens_follow_the_softmax_of_the_model() -> None:
    model = _model()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # tied: a distribution far from uniform
    plain = copy.deepcopy(model)
    rows = 3000
    drawn = _all(_requests(["12>"] * rows, max_tokens=1), _engine(model, max_sequences=1000))
    with torch.no_grad():
        expected = plain(torch.tensor([_prompt("12>")])).logits[0, -1].softmax(-1) * rows
    counts = torch.bincount(torch.tensor([one.tokens[0] for one in drawn]), minlength=74).double()
    often = expected > 5
    rest = torch.stack([counts[~often].sum(), expected[~often].sum()])
    counts = torch.cat([counts[often], rest[:1]])
    expected = torch.cat([expected[often], rest[1:]])
    assert len(counts) > 10
    square = float(((counts - expected) ** 2 / expected).sum())
    # Mean k - 1, variance 2 (k - 1): five deviations above the mean is never chance.
    freedom = len(counts) - 1
    assert square < freedom + 5 * (2 * freedom) ** 0.5


def test_a_partial_completion_continues_as_if_never_interrupted() -> None:
    requests = _requests(TEXTS, max_tokens=30)
    whole = _all(requests, _engine(endless=True))

    async def interrupted() -> list[Completion]:
        engine = _engine(max_sequences=4, endless=True)
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await _until(engine, 20)
        await engine.abort()
        parts = await asyncio.gather(*tasks)
        assert all(part.finish == "aborted" for part in parts)
        assert {0} < {len(part.tokens) for part in parts}, "two had not begun"
        again = [replace(one, partial=part) for one, part in zip(requests, parts, strict=True)]
        return await _generate(engine, again)

    for one, two in zip(whole, _run(interrupted()), strict=True):
        assert one.tokens == two.tokens
        assert one.finish == two.finish
        torch.testing.assert_close(one.logp, two.logp, atol=1e-9, rtol=0)


def test_a_partial_completion_that_is_full_comes_back_at_once() -> None:
    request = _requests(["12>"], max_tokens=2)[0]
    have = Completion((5, 6), (-1.0, -1.0), (3, 3), "aborted")
    assert _all([replace(request, partial=have)]) == [replace(have, finish="length")]


def test_abort_ends_the_named_requests_only() -> None:
    async def main() -> None:
        engine = _engine(max_sequences=2, endless=True)
        requests = _requests(["12>"] * 4, max_tokens=60)
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await _until(engine, 10)
        await engine.abort(["r1", "r3", "never heard of"])
        assert (await tasks[1]).finish == "aborted"
        assert len((await tasks[1]).tokens) >= 4
        assert await tasks[3] == Completion((), (), (), "aborted")
        assert not tasks[0].done()
        assert engine.stats()["aborted"] == 2
        rest = await asyncio.gather(tasks[0], tasks[2])
        assert [one.tokens for one in rest] == [
            one.tokens for one in await _generate(_engine(endless=True), [requests[0], requests[2]])
        ]

    _run(main())


def test_prompts_that_trickle_in_hold_nobody_up() -> None:
    async def main() -> None:
        engine, later = _engine(endless=True), []
        first = asyncio.ensure_future(engine.generate(_requests(["12>"], max_tokens=10)[0]))
        while not first.done() and len(later) < 100:
            request = _requests(["a"], first=1 + len(later), max_tokens=60)[0]
            later.append(asyncio.ensure_future(engine.generate(request)))
            await asyncio.sleep(0)
        assert len(later) < 40
        await asyncio.gather(*later)

    _run(main())


def test_a_cancelled_request_frees_its_row() -> None:
    async def main() -> None:
        engine = _engine(endless=True)
        task = asyncio.ensure_future(engine.generate(_requests(["12>"], max_tokens=400)[0]))
        await _until(engine, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats()["running"] == 0
        assert len(await _generate(engine, _requests(["12>"]))) == 1

    _run(main())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_no_token_is_drawn_between_pause_and_resume(mode: PauseMode) -> None:
    async def main() -> None:
        engine = _engine(max_sequences=2, endless=True)
        requests = _requests(TEXTS[:4], max_tokens=30)
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await _until(engine, 5)
        await engine.pause(mode)
        drawn = engine.stats()["generated_tokens"]
        late = asyncio.ensure_future(engine.generate(_requests(["a"], first=9)[0]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats()["generated_tokens"] == drawn
        assert not late.done()
        assert all(task.done() == (mode != "keep") for task in tasks)
        await engine.resume()
        ended = await asyncio.gather(*tasks)
        whole = await _generate(_engine(endless=True), requests)
        if mode == "abort":
            assert all(one.finish == "aborted" for one in ended)
            assert all(
                one.tokens == two.tokens[: len(one.tokens)]
                for one, two in zip(ended, whole, strict=True)
            )
        else:
            assert [one.tokens for one in ended] == [one.tokens for one in whole]
        assert (await late).finish in ("stop", "length")

    _run(main())


def test_a_swap_under_frozen_requests_marks_every_token_with_its_version() -> None:
    old, new = _model(0), _model(1)
    fresh = copy.deepcopy(new)

    async def main() -> tuple[Completion, Completion]:
        engine = _engine(copy.deepcopy(old), endless=True)
        await engine.load_weights(flat_weights(old), 6)
        task = asyncio.ensure_future(
            engine.generate(_requests(["12>"], max_tokens=12, temperature=0.0)[0])
        )
        await _until(engine, 5)
        await engine.pause("keep")
        await engine.load_weights(flat_weights(new), 7)
        later = asyncio.ensure_future(
            engine.generate(_requests(["hello"], first=5, temperature=0.0)[0])
        )
        await engine.resume()
        assert engine.version == 7
        return await task, await later

    kept, later = _run(main())
    assert kept.version == (6,) * 5 + (7,) * 7
    # Cached keys and values of the old weights, the last token and all later ones by the new.
    cache = transformers.DynamicCache()
    prompt = _prompt("12>")
    with torch.no_grad():
        old(torch.tensor([prompt + kept.tokens[:4]]), past_key_values=cache)
        for index in range(5, 12):
            logits = fresh(torch.tensor([[kept.tokens[index - 1]]]), past_key_values=cache).logits
            assert kept.tokens[index] == int(logits[0, -1].argmax())
    assert set(later.version) == {7}
    alone = _engine(fresh, endless=True)
    assert later.tokens == _all(_requests(["hello"], temperature=0.0), alone)[0].tokens


def test_new_weights_change_the_tied_embedding_and_equal_a_fresh_model() -> None:
    model = _model(0)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.embed_tokens.weight.copy_(_model(1).model.embed_tokens.weight)
    requests = _requests(TEXTS, temperature=0.0)
    before = _all(requests, _engine(copy.deepcopy(model)))

    async def main() -> list[Completion]:
        engine = _engine(model)
        await _generate(engine, requests)
        weights = {name: value.clone() for name, value in flat_weights(changed).items()}
        await engine.load_weights(weights, 3)
        for value in weights.values():
            value.zero_()  # the engine must have copied them
        return await _generate(engine, requests)

    after = _run(main())
    fresh = _all(requests, _engine(changed))
    assert [one.tokens for one in after] == [one.tokens for one in fresh]
    assert [one.tokens for one in after] != [one.tokens for one in before]
    assert {version for one in after for version in one.version} == {3}


def test_weights_are_refused_while_tokens_are_drawn_and_when_they_do_not_fit() -> None:
    async def main() -> None:
        engine = _engine(endless=True)
        weights = flat_weights(_model(1))
        assert engine.version == -1
        task = asyncio.ensure_future(engine.generate(_requests(["12>"], max_tokens=50)[0]))
        await _until(engine, 3)
        with pytest.raises(UniRLError, match=r"1 completions are in flight.*pause"):
            await engine.load_weights(weights, 1)
        await engine.pause()
        with pytest.raises(UniRLError, match="missing"):
            await engine.load_weights({}, 1)
        assert engine.version == -1
        await engine.load_weights({name: value.float() for name, value in weights.items()}, 1)
        await engine.resume()
        assert set((await task).version) == {-1, 1}

    _run(main())


def test_stop_texts_end_a_completion_and_stay_part_of_it() -> None:
    requests = _requests(["12>"] * 6, max_tokens=60)
    engine = _engine(endless=True)
    for whole, request in zip(_all(requests, engine), requests, strict=True):
        texts = [TOKENIZER.decode(whole.tokens[:end]) for end in range(len(whole.tokens) + 1)]
        stop = texts[10][len(texts[7]) :]
        end = next(end for end, text in enumerate(texts) if stop in text)
        got = _all([replace(request, sampling=SamplingConfig(max_tokens=60, stop=(stop, "\x00")))])
        assert got[0].tokens == whole.tokens[:end]
        assert got[0].finish == "stop"


@pytest.mark.parametrize("said", ["look: xyz", ""])
def test_stop_texts_of_an_earlier_turn_or_of_a_tool_end_nothing(said: str) -> None:
    requests = _requests(["12>"] * 4, max_tokens=40)
    for whole, request in zip(_all(requests, _engine(endless=True)), requests, strict=True):
        # The turn ended with the stop text, or a tool said one.
        stop = "xyz" if said else TOKENIZER.decode(whole.tokens[7:10])
        turn = Completion(whole.tokens[:10], whole.logp[:10], whole.version[:10], "aborted")
        again = replace(request, partial=turn.with_observation(_prompt(said)))
        free = _all([again], _engine(endless=True))[0]
        drawn = TOKENIZER.decode(free.tokens[10 + len(said) :])
        assert stop not in drawn, "choose other seeds"
        stopping = replace(again, sampling=SamplingConfig(max_tokens=40, stop=(stop,)))
        assert _all([stopping], _engine(endless=True))[0].tokens == free.tokens


def test_a_stop_text_that_an_interruption_cut_in_two_ends_the_completion() -> None:
    request = _requests(["12>"], max_tokens=40)[0]
    whole = _all([request], _engine(endless=True))[0]
    stop = TOKENIZER.decode(whole.tokens[7:12])
    part = Completion(whole.tokens[:10], whole.logp[:10], whole.version[:10], "aborted")
    sampling = SamplingConfig(max_tokens=40, stop=(stop,))
    again = replace(request, sampling=sampling, partial=part)
    done = _all([again], _engine(endless=True))[0]
    assert done.tokens == whole.tokens[:12] and done.finish == "stop"


def test_end_tokens_stop_and_the_context_limits() -> None:
    model = _model()
    model.generation_config.eos_token_id = [2, *range(10, 40)]
    ended = _all(_requests(TEXTS, max_tokens=60), _engine(model))
    for one in ended:
        assert one.finish == "stop"
        assert one.tokens[-1] in (2, *range(10, 40))
        assert not set(one.tokens[:-1]) & {2, *range(10, 40)}
    short = _all(_requests(["12>"], max_tokens=60, temperature=0.0), _engine(max_context=10))
    assert len(short[0].tokens) == 7
    assert short[0].finish == "length"


def test_top_k_of_one_is_greedy_and_says_so() -> None:
    greedy = _all(_requests(TEXTS, temperature=0.0))
    only = _all(_requests(TEXTS, top_k=1))
    assert [one.tokens for one in only] == [one.tokens for one in greedy]
    assert all(abs(logp) < 1e-12 for one in only for logp in one.logp)


def test_requests_that_cannot_be_are_explained() -> None:
    async def main() -> None:
        engine = _engine(max_context=8)
        request = _requests(["12>"], max_tokens=4)[0]
        with pytest.raises(UniRLError, match=r"it has 8 tokens.*may have 8.*task\.max_prompt"):
            await engine.generate(replace(request, prompt=(1,) * 8))
        for prompt in ((), (74,), (-1,)):
            with pytest.raises(UniRLError, match="from 0 to 73"):
                await engine.generate(replace(request, prompt=prompt))
        first = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0)
        with pytest.raises(UniRLError, match="in flight already"):
            await engine.generate(request)
        await first

    _run(main())


def test_a_context_longer_than_the_model_allows_is_refused() -> None:
    with pytest.raises(UniRLError, match=r"max_context is 600.*allows 512"):
        _run(_engine(max_context=600).start())


def test_a_model_whose_layers_keep_other_memory_is_refused() -> None:
    settings = transformers.MambaConfig(
        vocab_size=74, hidden_size=16, state_size=4, num_hidden_layers=2
    )
    engine = _engine(transformers.MambaForCausalLM(settings))
    with pytest.raises(UniRLError, match=r"engine hf cannot generate.*vllm"):
        _run(engine.start())


def test_what_breaks_in_a_step_reaches_everyone_who_waits() -> None:
    async def main() -> None:
        engine = _engine(endless=True)
        tasks = [
            asyncio.ensure_future(engine.generate(request))
            for request in _requests(TEXTS, max_tokens=100)
        ]
        await _until(engine, 3)
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineFailed, match="closed"):
                await task
        with pytest.raises(EngineFailed, match="closed"):
            await engine.generate(_requests(["12>"])[0])
        await engine.close()

    _run(main())


def test_a_sleeping_engine_holds_no_cache_and_wakes_up_as_it_was() -> None:
    requests = _requests(TEXTS)

    async def main() -> tuple[list[Completion], list[Completion]]:
        engine = _engine()
        before = await _generate(engine, requests)
        await engine.pause()
        await engine.sleep()
        await engine.sleep()
        assert engine.generation is not None
        assert engine.generation.cache.data.numel() == 0
        waiting = asyncio.ensure_future(_generate(engine, requests))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        await engine.wake()
        assert engine.stats()["waiting"] == len(requests), "paused before it slept"
        await engine.resume()
        return before, await waiting

    before, after = _run(main())
    assert before == after


@pytest.mark.gpu
def test_logp_on_cuda_equals_a_plain_forward_pass() -> None:
    model = _model(dtype=torch.float32)
    plain = copy.deepcopy(model)
    engine = HfEngine(ModelConfig(), EngineConfig(device="cuda"), loaded=(model, TOKENIZER))
    requests = _requests(TEXTS * 3, temperature=0.7)
    for request, got in zip(requests, _all(requests, engine), strict=True):
        expected = _plain_logp(plain, request.prompt, got.tokens, 0.7)
        assert (expected - torch.tensor(got.logp, dtype=torch.float64)).abs().max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_of_a_pretrained_model_equals_a_plain_forward_pass(
    tmp_path: Path, temperature: float
) -> None:
    from unirl.llm.models.smollm2 import make_smollm2

    try:
        config = ModelConfig(path=str(make_smollm2(tmp_path / "smollm2")), dtype="float32")
    except UniRLError as error:
        pytest.skip(str(error))
    model, tokenizer = load_model(config), load_tokenizer(config)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in ("What is 3 + 4?", "Name three colours.")
    ]
    sampling = SamplingConfig(temperature=temperature, max_tokens=24)
    requests = [
        Request(str(index), tuple(prompts[index % 2]), sampling, seed=index) for index in range(8)
    ]
    for request, got in zip(requests, _all(requests, HfEngine(config)), strict=True):
        expected = _plain_logp(model, request.prompt, got.tokens, temperature)
        assert (expected - torch.tensor(got.logp, dtype=torch.float64)).abs().max() <= 1e-4
