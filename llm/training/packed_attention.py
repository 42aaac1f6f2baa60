"""Attention over a pack, document by document: an attention function for transformers' models.

Everything else of the model runs on the packed tokens. In here queries, keys and values become the
rectangles of the layout, a completion sees the keys of its prompt before its own, and the results
go back into the pack. The sharing of prefixes is plain algebra of attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.errors import UniRLError
from unirl.llm.packages import needs
from unirl.llm.training.packed_kernels import (
    Prompt,
    causal_behind_prompts,
    fold_mask,
    is_long,
    is_short,
    long_attention,
    prompts_of_rows,
    short_attention,
)
from unirl.llm.training.packed_layout import Block, PackLayout
from unirl.llm.training.packed_rows import as_rows, as_tokens, prompts_of, split_blocks
from unirl.llm.training.packing import Pack

NAME = "unirl_packed"
"""What transformers knows the attention function as."""
QUERIES = 1024
"""Queries per call where a mask is needed: bounds its size, and skips keys that come later."""

_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of an attention function that change nothing here."""


class Packing:
    """What the layers of one forward pass share: the layout, and masks once they are made."""

    def __init__(self, layout: PackLayout) -> None:
        self.layout = layout
        self._masks: dict[tuple[object, ...], Tensor] = {}
        self._prompts: dict[int, list[Prompt]] = {}

    def mask(self, index: int, begin: int, end: int, like: Tensor) -> Tensor:
        """What queries begin..end of a block add to their scores: [1 or R, 1, end - begin, P + end]
        for the keys of the prompts, then the block's own up to `end`.
        """
        name = index, begin, like.dtype
        if name not in self._masks:
            block = self.layout.blocks[index]
            self._masks[name] = _mask(block, begin, end, like.dtype, like.device)
        return self._masks[name]

    def prompts(self, index: int) -> list[Prompt]:
        """Of a block whose rows are long."""
        if index not in self._prompts:
            self._prompts[index] = prompts_of_rows(self.layout.blocks[index])
        return self._prompts[index]

    def short_mask(self, index: int, num_heads: int, num_key_heads: int) -> Tensor:
        """The same for all queries of a block, as short_attention wants it."""
        name = index, num_heads, num_key_heads
        if name not in self._masks:
            block = self.layout.blocks[index]
            mask = _mask(block, 0, block.length, torch.float32, torch.device("cpu"))
            self._masks[name] = fold_mask(mask, num_heads, num_key_heads)
        return self._masks[name]


def hidden_states(model: nn.Module, pack: Pack) -> Tensor:
    """Last hidden states of a pack's tokens, final norm included: [N, hidden].

    model: a causal language model of transformers, or a peft model around one; its attention
    implementation is set to NAME, which is sdpa for all other calls. Gradient checkpointing works
    as the model has it. Raises UniRLError when the model's attention is not plain causal attention.
    """
    decoder = decoder_of(model)
    prepare(decoder)
    _check_positions(decoder.config, pack.layout.longest)
    out = decoder(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        # Four dimensions: transformers takes it for a finished mask, and makes none of its own.
        attention_mask=torch.zeros(1, 1, 1, 1, device=pack.input_ids.device),
        use_cache=False,
        unirl_packing=Packing(pack.layout),
    )
    states: Tensor = out.last_hidden_state[0]
    return states


def causal_model(model: nn.Module) -> Any:
    """The transformers model itself, out of what peft may have wrapped around it."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UniRLError(
            "the peft adapter learns a prompt",
            "packing knows adapters that change the weights of layers",
            "use LoRA",
        )
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def decoder_of(model: nn.Module) -> Any:
    inner = causal_model(model)
    if not hasattr(inner, "get_decoder"):
        raise UniRLError(
            f"{type(inner).__name__} cannot be trained on packs",
            "it must be a causal language model of transformers, it has no get_decoder()",
            "load it with AutoModelForCausalLM",
        )
    return inner.get_decoder()


def prepare(decoder: Any) -> None:
    """Have a decoder use packed attention; idempotent. Raises UniRLError when it cannot."""
    _register()
    config = decoder.config
    if config._attn_implementation == NAME:
        return
    name = type(decoder).__name__
    kinds = getattr(config, "layer_types", None)
    others = sorted(set(kinds or ()) - {"full_attention"})
    if others:
        raise _unsupported(f"{name} has layers of type {', '.join(others)}", "full attention")
    window = getattr(config, "sliding_window", None)
    # Some configurations keep a window that no layer uses, and say so in layer_types.
    if window is not None and not kinds:
        raise _unsupported(f"{name} has a sliding window of {window} tokens", "full attention")
    decoder.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise _unsupported(f"{name} has attention of its own", "transformers' AttentionInterface")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    unirl_packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D].

    Without `unirl_packing` it is transformers' sdpa. Raises UniRLError for arguments that change
    what is computed, such as sliding windows, soft caps and sinks.
    """
    if unirl_packing is None:
        return _plain(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    _check(module, kwargs)
    layout = unirl_packing.layout
    sizes = [block.num_tokens for block in layout.blocks]
    # [N, heads, D]: views, and the gradient of a split is one concatenation.
    q, k, v = (packed[0].transpose(0, 1) for packed in (query, key, value))
    k_prompt, k_blocks = split_blocks(k, sizes, layout.num_prompt_blocks)
    v_prompt, v_blocks = split_blocks(v, sizes, layout.num_prompt_blocks)
    outs: list[Tensor] = []
    for i, (block, q_block) in enumerate(zip(layout.blocks, torch.split(q, sizes), strict=True)):
        q_rows, k_rows, v_rows = (as_rows(x, block) for x in (q_block, k_blocks[i], v_blocks[i]))
        if is_long(q_rows, block, dropout):
            prompts = unirl_packing.prompts(i)
            out = long_attention(q_rows, k_rows, v_rows, k_prompt, v_prompt, prompts, scaling)
            outs.append(as_tokens(out.flatten(0, 1), block))
            continue
        if block.prompt is not None:
            k_rows = torch.cat([prompts_of(k_prompt, block), k_rows], 1)
            v_rows = torch.cat([prompts_of(v_prompt, block), v_rows], 1)
        out = _attend(unirl_packing, i, q_rows, k_rows, v_rows, scaling, dropout)
        outs.append(as_tokens(out, block))
    return torch.cat(outs)[None], None


def _register() -> None:
    """Each time: a prepared model may have come from another process."""
    with needs("transformers", "no language model can be trained"):
        from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(NAME, packed_attention)
    # For calls without a packing: the same masks as sdpa's.
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])  # type: ignore[no-untyped-call]


def _plain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    if attention_mask is not None and attention_mask.numel() < query.shape[2] * key.shape[2]:
        # The mask that hidden_states gives: a pack it is, but nothing else of it came here.
        raise _unsupported(
            f"{type(module).__name__} does not hand keyword arguments on",
            "transformers' AttentionInterface",
        )
    from transformers import AttentionInterface

    sdpa = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
    out, _ = sdpa(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def _check_positions(config: Any, longest: int) -> None:
    """Refuse position embeddings of short documents that would depend on a long one beside them."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind in ("dynamic", "longrope") and longest > limit:
        raise UniRLError(
            f"a document has {longest} tokens",
            f"with rope_type {kind} they may be {limit}: beyond, positions depend on the batch",
            "lower task.max_prompt or sampling.max_tokens",
        )


def _check(module: nn.Module, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    causal = kwargs.get("is_causal")
    if causal is False or (causal is None and not getattr(module, "is_causal", True)):
        raise _unsupported(f"{name} is not causal", "causal attention")
    for key, given in kwargs.items():
        if given is not None and key not in _HARMLESS:
            raise _unsupported(f"{name} gives its attention {key}={given!r:.40}", "none of this")


def _unsupported(what: str, rule: str) -> UniRLError:
    return UniRLError(
        what,
        f"packed training needs {rule}",
        "train a model such as Llama, Qwen2, Qwen3 or Mistral without a window",
    )


def _attend(
    packing: Packing,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """query [R, L, H, D], key and value [R, P + L, K, D] -> [R * L, H, D]."""
    if is_short(query, key.shape[1], dropout):
        mask = packing.short_mask(index, query.shape[2], key.shape[2])
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return short_attention(query, key, value, mask, scale).flatten(0, 1)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    block = packing.layout.blocks[index]
    masked = block.prompt is not None
    groups = q.shape[1] // k.shape[1]
    behind = q.is_cuda and masked and block.prompt_length is None
    if groups > 1 and q.is_cuda and ((masked and not behind) or q.dtype == torch.float32):
        # CUDA's kernels with a mask, or for float32, want as many heads of keys as of queries.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    attention = partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if not masked:
        return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)
    if behind:
        return causal_behind_prompts(attention, q, k, v).transpose(1, 2).flatten(0, 1)
    outs: list[Tensor] = []
    ahead = k.shape[2] - block.length
    for begin in range(0, block.length, QUERIES):
        end = min(begin + QUERIES, block.length)
        mask = packing.mask(index, begin, end, q)
        seen = ahead + end
        outs.append(attention(q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], attn_mask=mask))
    whole = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    return whole.transpose(1, 2).flatten(0, 1)


def _mask(block: Block, begin: int, end: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    ahead = 0 if block.prompt is None else block.prompt.shape[1]
    key = torch.arange(ahead + end, device=device)
    # Cells without a token see what precedes them, so that no row of scores is empty; they are
    # not seen, and nothing is taken from them.
    seen = (key <= torch.arange(begin, end, device=device)[:, None] + ahead)[None]
    if block.prompt_length is not None and block.of_prompt is not None:
        length = block.prompt_length.index_select(0, block.of_prompt)[:, None, None]
        seen = seen & ((key < length) | (key >= ahead))
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None]
