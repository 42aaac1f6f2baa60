"""The tensors that a model inside vLLM computes with, by the names that transformers knows them by:
fused layers, padded vocabularies, repacked and tied weights.

Source: vLLM's conventions (packed_modules_mapping, LinearBase, VocabParallelEmbedding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unirl.llm.weights.proof import canonical, columns, unnamed_reading

_EMBEDDING = "VocabParallelEmbedding"
_WRAPPED = "base_layer"
"""Below a layer that vLLM wrapped for adapters."""


@torch.no_grad()
def computed_tensors(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], version: int
) -> Iterator[tuple[str, str, Tensor]]:
    """(path in this model, name as sent, value) of all that could be found again. A matrix comes
    as its sampled columns, read through the layer's own kernel wherever it has one.

    shapes: what was sent, by its names. Only for models that are whole in this process.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    by_storage: dict[int, str] = {}
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in modules:
        if _is(module, _EMBEDDING) and f"{path}.weight" in shapes:
            by_storage[module.weight.data_ptr()] = f"{path}.weight"
    for path, module in modules:
        clean = path.removesuffix(f".{_WRAPPED}")
        for kind in ("weight", "bias"):
            value = getattr(module, kind, None)
            if not isinstance(value, Tensor):
                continue
            names = [f"{one}.{kind}" for one in _names(clean, packed)]
            if names[0] not in shapes and value.numel():
                names = [by_storage.get(value.data_ptr(), "")]  # a tied head
            if not all(name in shapes for name in names):
                continue
            whole = _value(module, kind, value, shapes[names[0]], version)
            sizes = [shapes[name][0] for name in names]
            for name, one in zip(names, torch.split(whole[: sum(sizes)], sizes), strict=True):
                yield f"{path}.{kind}", name, one


def refresh_tied_heads(model: nn.Module) -> None:
    """On CPU an output layer that shares the embedding's memory keeps its own repacked copy, which
    vLLM does not repack when weights are loaded again: do it here.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    modules: list[Any] = list(model.modules())
    shared = {
        module.weight.data_ptr()
        for module in modules
        if _is(module, _EMBEDDING) and not isinstance(module, ParallelLMHead)
    }
    for module in modules:
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            weight = module.weight
            if weight.numel() and weight.data_ptr() in shared:
                from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def repack_experts(model: nn.Module) -> None:
    """On CPU experts multiply with repacked weights, and vLLM copies those that are loaded again
    into their place as they came: repack them here. Only where all of them came.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return  # another release, or no CPU: what is wrong then shows in log-probabilities
    modules: list[Any] = list(model.modules())
    for module in modules:
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)


def adapter_readings(manager: Any, adapter: int) -> dict[str, list[str]]:
    """Readings of what an adapter manager holds: {layer: [A, B]}, of each layer in fused ones."""
    model = manager.get_adapter(adapter)
    found: dict[str, list[str]] = {}
    if model is None:
        return found
    for name, layer in model.loras.items():
        for one in (layer.lora_a, layer.lora_b):
            tensors = one if isinstance(one, list) else [one]
            found.setdefault(name, []).extend(
                unnamed_reading(each) for each in tensors if each is not None
            )
    return found


def _names(path: str, packed: Mapping[str, list[str]]) -> list[str]:
    before, dot, leaf = path.rpartition(".")
    return [f"{before}{dot}{one}" for one in packed.get(leaf, [leaf])]


def _value(module: Any, kind: str, value: Tensor, shape: tuple[int, ...], version: int) -> Tensor:
    """A bias or norm as it is; of a matrix the sampled columns [N, C], as multiplied with."""
    if kind == "bias" or len(shape) != 2:
        return value
    picked = columns(shape[1], version)
    multiply = getattr(module, "cpu_linear", None)
    if multiply is None or (_is(module, _EMBEDDING) and not _is(module, "ParallelLMHead")):
        return value[:, picked]
    dtype = value.dtype
    hot = torch.zeros(len(picked), shape[1], dtype=dtype, device=value.device)
    hot[torch.arange(len(picked)), torch.tensor(picked)] = 1
    return canonical(multiply(hot, value, None).T, dtype)


def _is(module: Any, kind: str) -> bool:
    return any(one.__name__ == kind for one in type(module).__mro__)
