"""An engine that does not compute with the weights it was sent is found out by what it says."""

from __future__ import annotations

import asyncio
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.llm.completion_server import CompletionServer
from tests.llm.tiny_experts import tiny_experts
from unirl.errors import UniRLError
from unirl.llm.engine import Completion, EngineConfig, EngineFailed, Request, SamplingConfig
from unirl.llm.models.model import ModelConfig, flat_weights

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

from unirl.llm.engines.hf.engine import HfEngine  # noqa: E402
from unirl.llm.engines.openai.engine import OpenAiEngine  # noqa: E402
from unirl.llm.models.plain import PlainModel  # noqa: E402
from unirl.llm.models.tiny import make_tiny, tiny_model, tiny_tokenizer  # noqa: E402

SMALL = {"width": 32, "layers": 2}


def small(seed: int) -> Any:
    return tiny_model(seed, **SMALL)


def hf_engine(model: Any, **settings: Any) -> HfEngine:
    config = EngineConfig(device="cpu", **settings)
    return HfEngine(ModelConfig(), config, loaded=(model, tiny_tokenizer()))


def keep_a_copy(layer: Any) -> None:
    """As kernels do that repack weights: what is loaded later, it does not compute with."""
    kept = copy.deepcopy(layer)
    layer.forward = kept.forward


@pytest.mark.parametrize("make", [small, tiny_experts])
def test_an_engine_with_a_stale_kernel_is_refused_at_its_first_swap(make: Any) -> None:
    model = make(0)
    keep_a_copy(model.model.layers[1].mlp)
    engine = hf_engine(model)
    with pytest.raises(UniRLError, match=r"under version 3 .* nats .* may be 0\.001 \(float32\)"):
        asyncio.run(engine.load_weights(flat_weights(make(1)), 3))
    assert engine.version == -1


@pytest.mark.parametrize("make", [small, tiny_experts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_engine_is_not_refused(make: Any, dtype: torch.dtype) -> None:
    engine = hf_engine(make(0).to(dtype))
    for version in (0, 1, 50, 51):
        asyncio.run(engine.load_weights(flat_weights(make(version).to(dtype)), version))
    assert engine.version == 51


def test_an_engine_that_goes_wrong_later_is_found_when_so_many_versions_have_passed() -> None:
    model = small(0)
    engine = hf_engine(model, probe_versions=10)
    for version in (0, 1):
        asyncio.run(engine.load_weights(flat_weights(small(version)), version))
    keep_a_copy(model.model.layers[1].mlp)
    for version in (2, 9):
        asyncio.run(engine.load_weights(flat_weights(small(version)), version))
    with pytest.raises(EngineFailed, match=r"under version 11 .* may be 0\.001"):
        asyncio.run(engine.load_weights(flat_weights(small(11)), 11))


def test_the_tolerance_can_be_set_and_the_comparison_left_out() -> None:
    for settings in ({"probe_tolerance": 50.0}, {"probe_versions": 0}):
        model = small(0)
        keep_a_copy(model.model.layers[1].mlp)
        engine = hf_engine(model, **settings)
        asyncio.run(engine.load_weights(flat_weights(small(1)), 1))
        assert engine.version == 1


def test_a_comparison_leaves_frozen_completions_as_they_are() -> None:
    async def swapped(probe_versions: int) -> list[Completion]:
        engine = hf_engine(small(0), probe_versions=probe_versions)
        how = SamplingConfig(max_tokens=60)
        tasks = [
            asyncio.ensure_future(engine.generate(Request(str(i), (5, 6 + i), how, seed=i)))
            for i in range(5)
        ]
        while engine.stats()["generated_tokens"] < 20:
            await asyncio.sleep(0)
        await engine.pause("keep")
        await engine.load_weights(flat_weights(small(1)), 1)
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(swapped(1)) == asyncio.run(swapped(0))


def test_a_plain_model_says_what_the_model_says_and_draws_no_random_numbers(
    tmp_path: Path,
) -> None:
    tokens = tuple(range(4, 30))
    for make in (small, tiny_experts):
        model = make(1)
        model.save_pretrained(tmp_path / make.__name__)
        state = torch.get_rng_state()
        named = PlainModel.named(ModelConfig(path=str(tmp_path / make.__name__)))
        assert torch.equal(state, torch.get_rng_state())
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        for plain in (named, PlainModel.of(make(0))):
            torch.testing.assert_close(plain.logp(flat_weights(model), tokens), wanted)


def test_a_model_that_is_more_than_its_settings_is_not_judged_by_them(tmp_path: Path) -> None:
    settings = transformers.DeepseekV3Config(
        vocab_size=74,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    settings.save_pretrained(tmp_path)
    with pytest.raises(UniRLError, match=r"e_score_correction_bias .* only its checkpoint has it"):
        PlainModel.named(ModelConfig(path=str(tmp_path)))


class Served:
    """A model behind a server that takes weights from a folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = make_tiny(folder / "tiny", **SMALL)
        self.settings = {"kind": "sglang", "model": str(self.folder), **settings}

    def swap(self, *versions: int, **settings: Any) -> int:
        """The engine's version after these swaps."""

        async def load(server: CompletionServer) -> int:
            config = EngineConfig(kind="openai", url=server.url, timeout_seconds=20, **settings)
            engine = OpenAiEngine(ModelConfig(path=server.model), config)
            try:
                await engine.start()
                for version in versions:
                    await engine.load_weights(flat_weights(small(version)), version)
                return engine.version
            finally:
                await engine.close()

        with CompletionServer(**self.settings, network=small(0)) as server:
            return asyncio.run(load(server))


def test_a_server_that_takes_all_weights_passes(tmp_path: Path) -> None:
    assert Served(tmp_path).swap(4, 5, dtype="float32") == 5


def test_a_server_that_ignores_some_weights_is_refused(tmp_path: Path) -> None:
    served = Served(tmp_path, ignores="layers.1.mlp")
    with pytest.raises(UniRLError, match=r"SGLang at .* may be 0\.001 \(float32\)"):
        served.swap(4, dtype="float32")
    with pytest.raises(UniRLError, match=r"may be 0\.3 \(bfloat16\)"):
        served.swap(4)  # it does not tell its precision


def test_a_server_that_cannot_be_compared_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert Served(tmp_path, gives_logp=True, tells_prompts=False).swap(4) == 4
    assert "not proven" in caplog.text and "no log-probabilities of a prompt" in caplog.text
