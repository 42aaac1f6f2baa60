"""Attention where torch's own way does not do: of short rows, and of long ones that share prompts.

Short rows, in bfloat16 and float16 on a CPU: three matrix products. PyTorch's kernel there is made
for long rows: on 64 rows of 47 queries and 87 keys, forward and backward take 88 ms with it and
19 ms here (bfloat16, 9 heads of 64, one core with AVX-512). Scores and softmax are float32, as in
the kernel; the weights are rounded before they meet the values, and kept for the gradient.

Long rows: no mask of all queries and keys. On a CPU queries meet the keys of their prompt, all of
them, and those of their own row, causally, in two calls of torch's kernel; the denominators of both
softmaxes join what they found, as in ring attention (arXiv 2310.01889), and the kernel's backward
pass takes the joined ones. The rows of a prompt are one long row of queries to it: its keys are
neither repeated nor padded. CUDA's kernels know by themselves that the last query sees the last
key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unirl.llm.training.packed_layout import MASK_CELLS, Block

MAX_KEYS = 384
"""With more keys per row the kernel is the faster one, and keeps no weights."""

_ATEN = torch.ops.aten


def is_short(query: Tensor, num_keys: int, dropout: float) -> bool:
    low = query.dtype in (torch.bfloat16, torch.float16)
    return low and query.device.type == "cpu" and num_keys <= MAX_KEYS and dropout == 0


def fold_mask(mask: Tensor, num_heads: int, num_key_heads: int) -> Tensor:
    """What is added to scores: [1 or R, 1, L, S] -> float32 [1 or R * K, H / K * L, S]."""
    groups = num_heads // num_key_heads
    if len(mask) > 1:
        mask = mask.expand(-1, num_key_heads, -1, -1)
    return mask.flatten(0, 1).repeat(1, groups, 1)


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """query [R, L, H, D], key and value [R, S, K, D], mask as fold_mask has it: [R, L, H, D]."""
    out: Tensor = _Short.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
    return out


def _fold(rows: Tensor, num_key_heads: int) -> Tensor:
    """[R, L, H, D] -> [R * K, H / K * L, D]: queries that share keys are one matrix."""
    num, length, heads, size = rows.shape
    groups = heads // num_key_heads
    split = rows.reshape(num, length, num_key_heads, groups, size).permute(0, 2, 3, 1, 4)
    return split.reshape(num * num_key_heads, groups * length, size)


def _unfold(folded: Tensor, shape: torch.Size) -> Tensor:
    num, length, heads, size = shape
    key_heads = len(folded) // num
    split = folded.view(num, key_heads, heads // key_heads, length, size).permute(0, 3, 1, 2, 4)
    return split.reshape(shape)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        heads = key.shape[2]
        q, k, v = (_fold(rows, heads) for rows in (query, key, value))
        scores = torch.baddbmm(mask, q.float(), k.float().transpose(1, 2), alpha=scale)
        weights = scores.softmax(-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, weights)
        ctx.shapes, ctx.scale = (query.shape, key.shape), scale
        return _unfold(weights @ v, query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        of_query, of_key = ctx.shapes
        g = _fold(grad, of_key[2])
        # Of the scores: weights * (d - sum(weights * d)), d being the gradient of the weights.
        d = (g @ v.transpose(1, 2)).mul_(weights)
        d = torch.addcmul(d, weights, d.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
        return (
            _unfold(d @ k, of_query),
            _unfold(d.transpose(1, 2) @ q, of_key),
            _unfold(weights.transpose(1, 2) @ g, of_key),
            None,
            None,
        )


class Prompt(NamedTuple):
    """Where the tokens of a prompt are in the pack, and the rows that continue it."""

    tokens: slice
    rows: Tensor


def is_long(query: Tensor, block: Block, dropout: float) -> bool:
    """Whether rows that continue prompts, on a CPU, would need too large a mask."""
    return (
        query.device.type == "cpu"
        and dropout == 0
        and block.prompt is not None
        and block.mask_cells > MASK_CELLS
    )


def prompts_of_rows(block: Block) -> list[Prompt]:
    assert block.prompt is not None and block.of_prompt is not None
    num, width = block.prompt.shape
    lengths = [width] * num if block.prompt_length is None else block.prompt_length.tolist()
    return [
        Prompt(slice(first, first + length), (block.of_prompt == i).nonzero().flatten())
        for i, (first, length) in enumerate(zip(block.prompt[:, 0].tolist(), lengths, strict=True))
    ]


def long_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    prompts: list[Prompt],
    scale: float | None,
) -> Tensor:
    """query [R, L, H, D], key and value [R, L, K, D], those of all prompts [n, K, D]:
    [R, L, H, D].
    """
    out: Tensor = _Long.apply(  # type: ignore[no-untyped-call]
        query, key, value, prompt_key, prompt_value, prompts, scale
    )
    return out


def causal_behind_prompts(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """attention: torch's, with its settings; query [R, H, L, D], key and value [R, H, P + L, D]:
    each query sees all of its prompt's P keys and causally its own. On CUDA without a mask;
    elsewhere torch makes one.
    """
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(query.shape[2], key.shape[2])
    return attention(query, key, value, attn_mask=bias)


def _heads_first(rows: Tensor) -> Tensor:
    """[R, L, H, D] -> [R, H, L, D], or [n, H, D] -> [1, H, n, D]"""
    return (rows if rows.dim() == 4 else rows[None]).transpose(1, 2)


def _folded(rows: Tensor) -> Tensor:
    """The rows of one prompt as one: [r, L, H, D] -> [1, H, r * L, D]"""
    return rows.flatten(0, 1)[None].transpose(1, 2)


class _Long(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prompt_key: Tensor,
        prompt_value: Tensor,
        prompts: list[Prompt],
        scale: float | None,
    ) -> Tensor:
        attend = _ATEN._scaled_dot_product_flash_attention_for_cpu
        q, k, v = map(_heads_first, (query, key, value))
        own, own_lse = attend(q, k, v, 0.0, True, scale=scale)
        out: Tensor = own.transpose(1, 2).contiguous()  # [R, L, H, D]
        lse = own_lse.transpose(1, 2).contiguous()  # [R, L, H]
        for prompt in prompts:
            k, v = (_heads_first(each[prompt.tokens]) for each in (prompt_key, prompt_value))
            found, found_lse = attend(_folded(query[prompt.rows]), k, v, 0.0, False, scale=scale)
            shape = len(prompt.rows), *lse.shape[1:]
            before, after = lse[prompt.rows], found_lse[0].t().reshape(shape)
            total = torch.logaddexp(before, after)
            theirs = found[0].transpose(0, 1).reshape(*shape, -1)
            joined = out[prompt.rows] * (before - total).exp()[..., None]
            joined = joined + theirs * (after - total).exp()[..., None]
            out[prompt.rows], lse[prompt.rows] = joined.to(out.dtype), total
        ctx.save_for_backward(query, key, value, prompt_key, prompt_value, out, lse)
        ctx.prompts, ctx.scale = prompts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, prompt_key, prompt_value, out, lse = ctx.saved_tensors
        attend = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        rows = [_heads_first(each) for each in (grad, query, key, value, out)]
        found = attend(*rows, lse.transpose(1, 2), 0.0, True, scale=ctx.scale)
        d_query, d_key, d_value = (each.transpose(1, 2) for each in found)
        d_query = d_query.contiguous()
        d_prompt_key, d_prompt_value = map(torch.zeros_like, (prompt_key, prompt_value))
        for prompt in ctx.prompts:
            g, q, o = (_folded(each[prompt.rows]) for each in (grad, query, out))
            k, v = (_heads_first(each[prompt.tokens]) for each in (prompt_key, prompt_value))
            denominators = lse[prompt.rows].flatten(0, 1).t()[None]
            dq, dk, dv = attend(g, q, k, v, o, denominators, 0.0, False, scale=ctx.scale)
            shape = len(prompt.rows), *query.shape[1:]
            d_query[prompt.rows] += dq[0].transpose(0, 1).reshape(shape)
            d_prompt_key[prompt.tokens] += dk[0].transpose(0, 1)
            d_prompt_value[prompt.tokens] += dv[0].transpose(0, 1)
        return d_query, d_key, d_value, d_prompt_key, d_prompt_value, None, None
