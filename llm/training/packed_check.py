"""A proof, by trying it, that a model computes on packs what it computes on plain sequences."""

from __future__ import annotations

import torch
from torch import nn

from unirl.errors import UniRLError
from unirl.llm.group import Group
from unirl.llm.training.language_policy import LanguagePolicy
from unirl.llm.training.packed_attention import causal_model
from unirl.llm.training.packing import pack_groups

_SHAPES = ((7, (5, 3)), (2, (4, 6)))
"""Tokens of two prompts, and of the completions of each."""


@torch.no_grad()
def check_packing(model: nn.Module, temperature: float = 1.0) -> float:
    """Log-probabilities of a few random tokens on one pack against those of the plain model, one
    sequence at a time: the largest difference, in nats.

    Raises UniRLError when it is more than rounding explains: the model mixes tokens other than by
    attention, or does something to its logits. Run it once, before training.
    """
    inner = causal_model(model)
    mode = model.training
    model.eval()
    try:
        worst, scale = _difference(model, temperature)
    finally:
        model.train(mode)
    # Rounding of logits, and as much again of what they are computed from.
    bound = 16 * torch.finfo(inner.dtype).eps * max(1.0, scale)
    if not worst <= bound:
        raise UniRLError(
            f"{type(inner).__name__} gives other log-probabilities on packs than without them",
            f"they differ by {worst:.2g} nats, and may differ by {bound:.2g}",
            "train a model such as Llama, Qwen2, Qwen3 or Mistral without a window",
        )
    return worst


def _difference(model: nn.Module, temperature: float) -> tuple[float, float]:
    """The largest difference, and the largest logit in use."""
    inner = causal_model(model)
    device = inner.get_input_embeddings().weight.device
    vocabulary = inner.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    groups = []
    for prompt, lengths in _SHAPES:
        num = sum(lengths)
        ids = torch.randint(vocabulary, (prompt + num,), generator=generator)
        none = torch.zeros(len(lengths), 1)
        groups.append(
            Group(
                prompt=ids[:prompt],
                token=ids[prompt:],
                logp=torch.zeros(num),
                mask=torch.ones(num, dtype=torch.bool),
                version=torch.zeros(num, dtype=torch.int32),
                starts=torch.tensor([0, *lengths]).cumsum(0),
                finish=none[:, 0],
                reward=none,
                outcome=none,
            )
        )
    (pack,) = pack_groups(groups, 10**9)
    found = LanguagePolicy(model, temperature=temperature)(pack.to(device)).logp.cpu()
    plain = torch.empty_like(found)
    number, scale = 0, 0.0
    for group in groups:
        for own in torch.split(group.token, group.lengths.tolist()):
            ids = torch.cat([group.prompt, own]).to(device)[None]
            logits = model(input_ids=ids, use_cache=False).logits[0].cpu().to(found.dtype)
            logits = logits[group.prompt.numel() - 1 : -1] / temperature
            logp = logits.log_softmax(-1).gather(1, own[:, None]).squeeze(1)
            mine = pack.sequence == number
            plain[mine] = logp[pack.position[mine]]
            scale = max(scale, float(logits.abs().max()))
            number += 1
    return float((found - plain).abs().max()), scale
