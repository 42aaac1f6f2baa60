"""The order of the documents in a pack, and in which batches attention goes over them.

A row is a prompt, a completion that continues a prompt of the same pack, or both in one piece. Rows
stand one behind the other, without padding, in the order of their blocks; inside attention alone a
block becomes a rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unirl.llm.group import with_tensors

CALL_COST = 16384
"""What one more call of an attention kernel costs, counted in products of a query and a key: blocks
are split only where that saves more padding than this. More: fewer calls, more padding."""

MASK_CELLS = 2**22
"""Queries times keys of a block above which no mask of them is made. More: fewer and larger calls
of an attention kernel, more memory."""


class Row(NamedTuple):
    """A row to lay out: its tokens, and the row it continues (None: it stands alone)."""

    length: int
    prompt: int | None = None


@dataclass(frozen=True)
class Block:
    """Rows that attention treats as one batch: R rows of at most L tokens, n tokens in all.

    They attend to themselves, causally, and before that to whole prompts: `prompt` [U, P] are the
    positions in the pack of the distinct prompts' tokens, of_prompt [R] says whose each row is, and
    prompt_length [U] how long they are (None: all have P). No prompts at all: the three are None.
    cell [n] is the cell of each token in the flattened rectangle [R * L], fill [R * L] the token
    (counted from the block's first) of each cell, with any token of the row where there is none.
    Both are None where the rectangle has no hole.
    """

    num_tokens: int
    num_rows: int
    length: int
    cell: Tensor | None = None
    fill: Tensor | None = None
    prompt: Tensor | None = None
    of_prompt: Tensor | None = None
    prompt_length: Tensor | None = None

    @property
    def mask_cells(self) -> int:
        """Queries times keys that a mask would have: once, or where prompts differ for each row."""
        ahead = 0 if self.prompt is None else self.prompt.shape[1]
        num_masks = 1 if self.prompt_length is None else self.num_rows
        return num_masks * self.length * (ahead + self.length)

    def to(self, device: torch.device | str) -> Block:
        return with_tensors(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class PackLayout:
    """The blocks of a pack in the order of its tokens."""

    blocks: tuple[Block, ...]
    num_prompt_blocks: int
    """So many blocks at the beginning are prompts that other rows continue."""
    longest: int
    """Tokens of the longest document, prompt included."""

    def to(self, device: torch.device | str) -> PackLayout:
        return replace(self, blocks=tuple(block.to(device) for block in self.blocks))


def lay_out(rows: Sequence[Row]) -> tuple[PackLayout, list[int]]:
    """The layout of these rows, and the order in which their tokens have to stand.

    Rows without tokens are left out; they may still be part of `rows` so that indices hold.
    """
    shared = {row.prompt for row in rows if row.prompt is not None}
    prompts = [i for i in range(len(rows)) if i in shared]
    others = [i for i, row in enumerate(rows) if i not in shared and row.length > 0]
    # A block either has prompts, one for each of its rows, or none.
    parted = [[i for i in others if (rows[i].prompt is None) is alone] for alone in (False, True)]
    start: dict[int, int] = {}
    blocks: list[Block] = []
    num_tokens = num_prompt_blocks = 0
    for members in (prompts, *parted):
        # Stable: rows of one shape stay in the order given.
        members.sort(key=lambda i: (-rows[i].length, -_prompt_length(rows, i)))
        lengths = [rows[i].length for i in members]
        for cut in _blocks(lengths, [_prompt_length(rows, i) for i in members]):
            for chosen in _maskable(rows, [members[j] for j in cut]):
                for i in chosen:
                    start[i] = num_tokens
                    num_tokens += rows[i].length
                blocks.append(_block(rows, chosen, start))
        if members is prompts:
            num_prompt_blocks = len(blocks)
    longest = max((row.length + _prompt_length(rows, i) for i, row in enumerate(rows)), default=0)
    return PackLayout(tuple(blocks), num_prompt_blocks, longest), list(start)


def _prompt_length(rows: Sequence[Row], i: int) -> int:
    prompt = rows[i].prompt
    return 0 if prompt is None else rows[prompt].length


def _blocks(lengths: list[int], prompts: list[int]) -> list[range]:
    """Cut rows, sorted by falling length, where it saves most, as long as it saves anything.

    A block of R rows costs R L (P + L) + CALL_COST, L and P being the longest of its rows and of
    their prompts.
    """
    done: list[range] = []
    todo = [range(len(lengths))] if lengths else []
    while todo:
        rows = todo.pop()
        left = lengths[rows.start]
        whole = len(rows) * left * (max(prompts[i] for i in rows) + left)
        behind = [0] * (len(rows) + 1)
        for i in reversed(range(len(rows))):
            behind[i] = max(behind[i + 1], prompts[rows[i]])
        best, where, before = whole - CALL_COST, 0, 0
        for i in range(1, len(rows)):
            before = max(before, prompts[rows[i - 1]])
            if (
                lengths[rows[i]] == lengths[rows[i - 1]]
                and prompts[rows[i]] == prompts[rows[i - 1]]
            ):
                continue
            right = lengths[rows[i]]
            cost = i * left * (before + left) + (len(rows) - i) * right * (behind[i] + right)
            if cost < best:
                best, where = cost, i
        if where:
            todo += [rows[where:], rows[:where]]
        else:
            done.append(rows)
    return done


def _maskable(rows: Sequence[Row], chosen: list[int]) -> list[list[int]]:
    """The rows of a block; apart by the lengths of their prompts where a mask of these, one for
    each row, would be too large.
    """
    ahead: dict[int, list[int]] = {}
    for i in chosen:
        ahead.setdefault(_prompt_length(rows, i), []).append(i)
    longest = max(rows[i].length for i in chosen)
    if len(chosen) * longest * (max(ahead) + longest) <= MASK_CELLS:
        return [chosen]
    return list(ahead.values())


def _block(rows: Sequence[Row], chosen: list[int], start: dict[int, int]) -> Block:
    length = torch.tensor([rows[i].length for i in chosen])
    num_tokens, longest = int(length.sum()), int(length.max())
    block = Block(num_tokens, len(chosen), longest)
    if num_tokens < len(chosen) * longest:
        column = torch.arange(longest)
        first = length.cumsum(0) - length
        block = replace(
            block,
            cell=(column < length[:, None]).flatten().nonzero().flatten(),
            fill=(first[:, None] + column.minimum(length[:, None] - 1)).flatten(),
        )
    prompts = [rows[i].prompt for i in chosen]
    distinct = [p for p in dict.fromkeys(prompts) if p is not None]
    if not distinct:
        return block
    sizes = torch.tensor([rows[p].length for p in distinct])
    column = torch.arange(int(sizes.max())).minimum(sizes[:, None] - 1)
    index = {p: i for i, p in enumerate(distinct)}
    return replace(
        block,
        prompt=torch.tensor([start[p] for p in distinct])[:, None] + column,
        of_prompt=torch.tensor([index[p] for p in prompts if p is not None]),
        prompt_length=None if bool((sizes == sizes[0]).all()) else sizes,
    )
