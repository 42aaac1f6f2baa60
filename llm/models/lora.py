"""Adapters of low rank: the base stays as it is, and serves as the reference.

LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.models.model import ModelConfig, flat_weights, load_model
from unirl.llm.packages import needs

PREFIX = "base_model.model."
"""What peft puts before the names of a model's parameters."""


def add_adapters(model: Any, config: ModelConfig) -> Any:
    """The model with adapters that alone learn, in float32; the model itself at rank 0.

    Raises UniRLError when peft is missing or a layer that config names is not there.
    """
    if config.lora_rank == 0:
        return model
    with needs("peft", f"model.lora_rank {config.lora_rank} cannot be trained"):
        import peft
    targets: Any = list(config.lora_targets) or "all-linear"
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UniRLError(
            f"model.lora_targets {list(config.lora_targets)} do not fit {type(model).__name__}",
            str(error),
            "leave it out: all linear layers but the last get adapters",
        ) from error


@torch.no_grad()
def published_adapters(model: Any) -> dict[str, Tensor]:
    """What engines need that load adapters themselves: lora_A [r, K] and lora_B [N, r], by peft's
    names.
    """
    return {name: value for name, value in flat_weights(model).items() if "lora_" in name}


def with_base(weights: Weights, config: ModelConfig) -> Weights:
    """What engines need that load none: adapters as published, merged into the base, which is read
    again: kept, it would take a model's memory all the time. Other weights stay as they are.
    """
    if not any("lora_" in name for name in weights):
        return weights
    model = add_adapters(load_model(config), config)
    for name, value in published_adapters(model).items():
        if name not in weights:
            raise UniRLError(
                f"adapter {name} is missing",
                f"the learner's and the engine's must be the same, {len(weights)} came",
                "give both the same model.lora_targets",
            )
        value.copy_(weights[name])
    return published_weights(model)


def published_weights(model: Any) -> Weights:
    """What engines need: parameters by the names of the model without adapters, these added."""
    return _Merged(model) if hasattr(model, "peft_config") else flat_weights(model)


class _Merged(Mapping[str, Tensor]):
    """Each weight with its adapter, added when it is asked for: all at once they would be a second
    model.
    """

    def __init__(self, model: Any) -> None:
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        self._found: dict[str, tuple[Tensor, str]] = {}
        """By the name that engines know: the weight, and the layer whose adapter is added."""
        for name, value in flat_weights(model).items():
            if "lora_" in name:
                continue
            layer, _, rest = name.rpartition(".base_layer.")
            own = f"{layer}.{rest}" if layer else name
            self._found[own.removeprefix(PREFIX)] = value, layer if rest == "weight" else ""

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        value, layer = self._found[name]
        if not layer:
            return value
        delta = self._layers[layer].get_delta_weight("default")
        merged: Tensor = (value.float() + delta.float()).to(value.dtype)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
