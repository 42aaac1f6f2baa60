"""Engines by their kind; source: none."""

from __future__ import annotations

from dataclasses import replace

from unirl.llm.engine import Engine, EngineConfig
from unirl.llm.model import ModelConfig


def make_engine(config: EngineConfig, model: ModelConfig) -> Engine:
    """The engine a config asks for; nothing is started or imported that only another one needs."""
    merged = config.kind != "vllm" or config.transfer != "lora"
    base = replace(model, lora_rank=0) if merged else model
    if config.kind == "hf":
        from unirl.llm.hf_engine import HfEngine

        return HfEngine(base, config)
    if config.kind == "vllm" and not config.url:
        from unirl.llm.vllm_engine import VllmEngine

        return VllmEngine(base, config)
    from unirl.llm.openai_engine import OpenAiEngine

    return OpenAiEngine(base, config)
