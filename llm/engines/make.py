"""Engines by their kind; source: none."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from unirl.llm.engine import Engine, EngineConfig
from unirl.llm.models.model import ModelConfig


def require_engine(config: EngineConfig) -> None:
    """Raise UniRLError where the engine needs a package that is missing; nothing is loaded."""
    if config.kind == "vllm" and not config.url and importlib.util.find_spec("vllm") is None:
        from unirl.llm.engines.vllm_arguments import missing_vllm

        raise missing_vllm("there is no package vllm in this environment")


def make_engine(config: EngineConfig, model: ModelConfig) -> Engine:
    """The engine a config asks for; nothing is started or imported that only another one needs."""
    merged = config.kind != "vllm" or config.transfer != "lora"
    base = replace(model, lora_rank=0) if merged else model
    if config.kind == "hf":
        from unirl.llm.engines.hf_engine import HfEngine

        return HfEngine(base, config)
    if config.kind == "vllm" and not config.url:
        from unirl.llm.engines.vllm_engine import VllmEngine

        return VllmEngine(base, config)
    from unirl.llm.engines.openai_engine import OpenAiEngine

    return OpenAiEngine(base, config)
