"""Random groups, tiny models, and the plain way to train on them: one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unirl.llm.group import Group

VOCAB = 61


def make_groups(
    *sizes: tuple[int, Sequence[int]], seed: int = 0, tools: bool = False
) -> list[Group]:
    """One group for each (tokens of the prompt, tokens of each completion). tools: some tokens in
    the middle of completions have mask 0.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for ticket, (num_prompt, lengths) in enumerate(sizes):
        num = sum(lengths)
        mask = torch.ones(num, dtype=torch.bool)
        if tools:
            mask = torch.rand(num, generator=generator) < 0.7
        groups.append(
            Group(
                prompt=torch.randint(VOCAB, (num_prompt,), generator=generator, dtype=torch.int32),
                token=torch.randint(VOCAB, (num,), generator=generator, dtype=torch.int32),
                logp=torch.randn(num, generator=generator),
                mask=mask,
                version=torch.zeros(num, dtype=torch.int32),
                starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
                finish=torch.zeros(len(lengths), dtype=torch.int8),
                reward=torch.zeros(len(lengths), 1),
                outcome=torch.zeros(len(lengths), 1, dtype=torch.int8),
                ticket=ticket,
            )
        )
    return groups


def make_model(kind: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of transformers with two layers and four heads; `kind` names its family."""
    import transformers

    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        # Large weights: attention then matters, and a wrong one shows.
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **({"sliding_window": None} if kind == "mistral" else {}),
        **changes,
    }
    config = transformers.AutoConfig.for_model(kind, **settings)
    # Torch 2.11 draws other numbers in bfloat16: the same ones, rounded.
    drawn = dtype if dtype.itemsize >= 4 else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=drawn)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        _exact_norms(model)
    return model


def _exact_norms(model: nn.Module) -> None:
    """Norms of transformers go through float32, which would hide errors below 1e-7."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
                exact = nn.RMSNorm(norm.weight.numel(), eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)


def plain_logp(
    model: nn.Module, groups: Sequence[Group], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every token of the batch, in its order: the model reads one
    sequence at a time, and softmax sees all logits.
    """
    logps, entropies = [], []
    for group in groups:
        for own in group.token.long().split(group.lengths.tolist()):
            ids = torch.cat([group.prompt.long(), own])[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, group.prompt.numel() - 1 : -1]
            logp = (logits / temperature).log_softmax(-1)
            logps.append(logp.gather(1, own[:, None]).squeeze(1))
            entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters, which then have none any more."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
