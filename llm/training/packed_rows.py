"""Packed tokens into the rectangles of the layout's blocks, and back; gradients included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unirl.llm.training.packed_layout import Block


def split_blocks(packed: Tensor, sizes: list[int], num_prompts: int) -> tuple[Tensor, list[Tensor]]:
    """All shared prompts' tokens, and every block's: [n, heads, D]."""
    if not num_prompts:
        return packed[:0], list(torch.split(packed, sizes))
    num_tokens = sum(sizes[:num_prompts])
    prompt, rest = torch.split(packed, [num_tokens, packed.shape[0] - num_tokens])
    blocks = *torch.split(prompt, sizes[:num_prompts]), *torch.split(rest, sizes[num_prompts:])
    return prompt, list(blocks)


def as_rows(tokens: Tensor, block: Block) -> Tensor:
    """[n, heads, D] -> [R, L, heads, D]"""
    if block.cell is not None:
        tokens = _PutIn.apply(tokens, block.fill, block.cell)  # type: ignore[no-untyped-call]
    return tokens.reshape(block.num_rows, block.length, *tokens.shape[1:])


def as_tokens(rows: Tensor, block: Block) -> Tensor:
    """[R * L, heads, D] -> [n, heads, D]"""
    if block.cell is not None:
        rows = _TakeOut.apply(rows, block.cell)  # type: ignore[no-untyped-call]
    return rows


def prompts_of(prompt: Tensor, block: Block) -> Tensor:
    """What the rows of a block see of their prompts: [n, heads, D] -> [R, P, heads, D]."""
    assert block.prompt is not None
    rows: Tensor = _Prompts.apply(prompt, block.prompt, block.of_prompt)  # type: ignore[no-untyped-call]
    return rows


class _PutIn(torch.autograd.Function):
    """Tokens into the flattened rectangle of their block; its gradient only takes them out again,
    where index_select's own would add up rows one by one.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, fill: Tensor, cell: Tensor) -> Tensor:
        ctx.save_for_backward(cell)
        return tokens.index_select(0, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (cell,) = ctx.saved_tensors
        return grad.index_select(0, cell), None, None


class _TakeOut(torch.autograd.Function):
    """Tokens out of the flattened rectangle of their block."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cell: Tensor) -> Tensor:
        ctx.save_for_backward(cell)
        ctx.num = rows.shape[0]
        return rows.index_select(0, cell)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cell,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num, *grad.shape[1:]).index_copy_(0, cell, grad), None


class _Prompts(torch.autograd.Function):
    """The prompt [n, heads, D] of each row, at positions [U, P]: [R, P, heads, D]. The gradient
    of all rows of a prompt is a matrix product: a sum in full precision, rounded once, and the same
    at every run.
    """

    @staticmethod
    def forward(ctx: Any, prompt: Tensor, position: Tensor, of_prompt: Tensor) -> Tensor:
        ctx.save_for_backward(position, of_prompt)
        ctx.shape = prompt.shape
        chosen = prompt.index_select(0, position.flatten()).view(len(position), -1)
        return chosen.index_select(0, of_prompt).view(-1, position.shape[1], *prompt.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        position, of_prompt = ctx.saved_tensors
        number = torch.arange(len(position), device=grad.device)
        total = (number[:, None] == of_prompt).to(grad.dtype) @ grad.reshape(len(grad), -1)
        # Positions beyond a prompt's end name its last token once more; they have no gradient.
        total = total.view(-1, *ctx.shape[1:])
        return grad.new_zeros(ctx.shape).index_add_(0, position.flatten(), total), None, None
