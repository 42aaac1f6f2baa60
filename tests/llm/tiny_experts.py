"""A tiny mixture of experts with random weights."""

from __future__ import annotations

from typing import Any

import torch


def tiny_experts(seed: int, *, width: int = 32, vocabulary: int = 74) -> Any:
    """A Qwen3-MoE of transformers with two layers of four experts."""
    import transformers

    settings = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(settings).eval()
