"""Attention over a pack, document by document: an attention function for transformers' models.

Everything else of the model runs on the packed tokens. In here queries, keys and values become the
rectangles of the layout, a completion sees the keys of its prompt before its own, and the results
go back into the pack. Source: none; the sharing of prefixes is plain algebra of attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unirl.core.errors import UniRLError
from unirl.llm.packed_layout import Block, Layout
from unirl.llm.packed_short import fold_mask, short_attention, suits
from unirl.llm.packing import Pack

NAME = "unirl_packed"
"""What transformers knows the attention function as."""
QUERIES = 1024
"""Queries per call where a mask is needed: bounds its size, and skips keys that lie ahead."""

_HARMLESS = frozenset(
    {
        "cache_position",
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

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def mask(self, index: int, begin: int, end: int, like: Tensor) -> Tensor:
        """What queries begin..end of a block add to their scores: [1 or R, 1, end - begin, P + end]
        for the keys of the prompts, then the block's own up to `end`.
        """
        name = index, begin, like.dtype
        if name not in self._masks:
            block = self.layout.blocks[index]
            self._masks[name] = _mask(block, begin, end, like.dtype, like.device)
        return self._masks[name]

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
    """The part of a model that ends with hidden states."""
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
    _register()
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
    k_prompt, k_parts = _split(k, sizes, layout.num_prompt_blocks)
    v_prompt, v_parts = _split(v, sizes, layout.num_prompt_blocks)
    outs: list[Tensor] = []
    for i, (block, q_part) in enumerate(zip(layout.blocks, torch.split(q, sizes), strict=True)):
        q_rows, k_rows, v_rows = (_rows(part, block) for part in (q_part, k_parts[i], v_parts[i]))
        if block.prompt is not None:
            k_rows = torch.cat([_prompts(k_prompt, block), k_rows], 1)
            v_rows = torch.cat([_prompts(v_prompt, block), v_rows], 1)
        out = _attend(unirl_packing, i, q_rows, k_rows, v_rows, scaling, dropout)
        outs.append(_tokens(out, block))
    return torch.cat(outs)[None], None


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise UniRLError(
            "training a language model needs transformers",
            f"it cannot be imported: {error}",
            "pip install 'unirl[llm]'",
        ) from error
    AttentionInterface.register(NAME, packed_attention)
    # For calls without a packing: the same masks as sdpa's.
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    if attention_mask is not None and attention_mask.shape == (1, 1, 1, 1) != (
        *query.shape[:1],
        1,
        query.shape[2],
        key.shape[2],
    ):
        raise _unsupported(
            f"{type(module).__name__} keeps its model's arguments from its attention",
            "keyword arguments handed on, as transformers' AttentionInterface has it",
        )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def _check(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what would be computed wrongly."""
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


def _split(packed: Tensor, sizes: list[int], num_prompts: int) -> tuple[Tensor, list[Tensor]]:
    """All shared prompts' tokens, and every block's: [n, heads, D]."""
    if not num_prompts:
        return packed[:0], list(torch.split(packed, sizes))
    num_tokens = sum(sizes[:num_prompts])
    prompt, rest = torch.split(packed, [num_tokens, packed.shape[0] - num_tokens])
    parts = *torch.split(prompt, sizes[:num_prompts]), *torch.split(rest, sizes[num_prompts:])
    return prompt, list(parts)


def _rows(part: Tensor, block: Block) -> Tensor:
    """[n, heads, D] -> [R, L, heads, D]"""
    if block.slot is not None:
        part = _PutIn.apply(part, block.fill, block.slot)  # type: ignore[no-untyped-call]
    return part.reshape(block.num_rows, block.length, *part.shape[1:])


def _tokens(rows: Tensor, block: Block) -> Tensor:
    """[R * L, heads, D] -> [n, heads, D]"""
    if block.slot is not None:
        rows = _TakeOut.apply(rows, block.slot)  # type: ignore[no-untyped-call]
    return rows


def _prompts(prompt: Tensor, block: Block) -> Tensor:
    """What the rows of a block see of their prompts: [n, heads, D] -> [R, P, heads, D]."""
    assert block.prompt is not None
    rows: Tensor = _Prompts.apply(prompt, block.prompt, block.of_prompt)  # type: ignore[no-untyped-call]
    return rows


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
    if suits(query, key.shape[1], dropout):
        mask = packing.short_mask(index, query.shape[2], key.shape[2])
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return short_attention(query, key, value, mask, scale).flatten(0, 1)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    block = packing.layout.blocks[index]
    masked = block.prompt is not None
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and (masked or q.dtype == torch.float32):
        # CUDA's kernels with a mask want as many heads of keys as of queries.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    attention = partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if not masked:
        return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)
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
    place = torch.arange(ahead + end, device=device)
    # Places without a token see what precedes them, so that no row of scores is empty; nobody
    # sees them, and nothing is taken from them.
    seen = (place <= torch.arange(begin, end, device=device)[:, None] + ahead)[None]
    if block.prompt_length is not None and block.of_prompt is not None:
        length = block.prompt_length.index_select(0, block.of_prompt)[:, None, None]
        seen = seen & ((place < length) | (place >= ahead))
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None]


class _PutIn(torch.autograd.Function):
    """Tokens into the flattened rectangle of their block; its gradient only takes them out again,
    where index_select's own would add up rows one by one.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, fill: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return part.index_select(0, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return grad.index_select(0, slot), None, None


class _TakeOut(torch.autograd.Function):
    """Tokens out of the flattened rectangle of their block."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.num = rows.shape[0]
        return rows.index_select(0, slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slot,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num, *grad.shape[1:]).index_copy_(0, slot, grad), None


class _Prompts(torch.autograd.Function):
    """The prompt [n, heads, D] of each row, from places [U, P]: [R, P, heads, D]. The gradient of
    all rows of a prompt is a matrix product: a sum in full precision, rounded once, and the same
    at every run.
    """

    @staticmethod
    def forward(ctx: Any, prompt: Tensor, place: Tensor, of_prompt: Tensor) -> Tensor:
        ctx.save_for_backward(place, of_prompt)
        ctx.shape = prompt.shape
        chosen = prompt.index_select(0, place.flatten()).view(len(place), -1)
        return chosen.index_select(0, of_prompt).view(-1, place.shape[1], *prompt.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        place, of_prompt = ctx.saved_tensors
        number = torch.arange(len(place), device=grad.device)
        total = (number[:, None] == of_prompt).to(grad.dtype) @ grad.reshape(len(grad), -1)
        # Places beyond a prompt's end name its last token once more; they have no gradient.
        total = total.view(-1, *ctx.shape[1:])
        return grad.new_zeros(ctx.shape).index_add_(0, place.flatten(), total), None, None
