"""Engines by their kind."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from unirl.errors import UniRLError
from unirl.llm.engine import Engine, EngineConfig
from unirl.llm.models.model import ModelConfig


def require_engine(config: EngineConfig, model: ModelConfig) -> None:
    """Raise UniRLError where the engine needs a package that is missing, or adapters that there are
    not; nothing is loaded.
    """
    if config.transfer == "lora" and config.kind != "hf":
        _require_adapters(config, model)
    if config.kind == "vllm" and not config.is_server and importlib.util.find_spec("vllm") is None:
        from unirl.llm.engines.vllm.arguments import missing_vllm

        raise missing_vllm("there is no package vllm in this environment")


def takes_adapters(config: EngineConfig) -> bool:
    return config.kind == "vllm" and config.transfer == "lora" and not config.is_server


def make_engine(config: EngineConfig, model: ModelConfig) -> Engine:
    """The engine a config asks for; nothing is started or imported that only another one needs."""
    base = model if takes_adapters(config) else replace(model, lora_rank=0)
    if config.kind == "hf":
        from unirl.llm.engines.hf.engine import HfEngine

        return HfEngine(base, config)
    if config.kind == "vllm" and not config.is_server:
        from unirl.llm.engines.vllm.engine import VllmEngine

        return VllmEngine(base, config)
    if config.urls_file or len(config.urls) > 1:
        from unirl.llm.engines.router import Router

        return Router(base, config)
    from unirl.llm.engines.openai.engine import OpenAiEngine

    return OpenAiEngine(base, config)


def _require_adapters(config: EngineConfig, model: ModelConfig) -> None:
    if config.is_server:
        raise UniRLError(
            f"engine.transfer is lora and engine.url is {config.url or config.urls_file}",
            "adapters alone travel to a vLLM that UniRL starts itself; a server takes whole "
            "weights, into which adapters are merged",
            "leave engine.transfer out, or engine.url",
        )
    if model.lora_rank == 0:
        raise UniRLError(
            "engine.transfer is lora and model.lora_rank is 0",
            "only adapters travel, and at rank 0 there are none: all weights learn",
            "set model.lora_rank to 16, say, or leave engine.transfer out",
        )
