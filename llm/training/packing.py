"""Groups of completions become micro-batches without padding, in which a prompt is computed once
for all completions of its group.

Rows whose advantage is zero are left out by the caller; what only pads, or predicts nothing that is
trained, is never computed: no logits of the prompt, no token behind the last one trained (unless a
critic is asked what it is worth).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from unirl.errors import UniRLError
from unirl.llm.group import Group, with_tensors
from unirl.llm.training.packed_layout import PackLayout, Row, lay_out


@dataclass(frozen=True)
class Pack:
    """One micro-batch: N input tokens, and M tokens to be predicted.

    The completions of a batch are numbered through all its groups, also those left out; so are
    their tokens, in the order of torch.cat([group.token for group in groups]).
    """

    input_ids: Tensor
    """[1, N]"""
    position_ids: Tensor
    """[1, N]: counted from 0 in every prompt; every completion of it continues there."""
    layout: PackLayout
    """Which token attends to which."""
    source: Tensor
    """[M]: the input whose hidden state predicts the token. The last token of a shared prompt
    predicts the first one of each completion."""
    target: Tensor
    """[M]: the token to be predicted."""
    sequence: Tensor
    """[M]: number of the completion in the batch."""
    position: Tensor
    """[M]: of the token in its completion."""
    flat: Tensor
    """[M]: number of the token in the batch, to gather what is kept per token."""
    end: Tensor
    """[E]: the input that is the last token of a completion whose whole text is wanted."""
    end_sequence: Tensor
    """[E]: number of that completion in the batch."""

    @property
    def num_targets(self) -> int:
        """M: what is trained."""
        return self.target.numel()

    def to(self, device: torch.device | str) -> Pack:
        moved = with_tensors(self, lambda tensor: tensor.to(device))
        return replace(moved, layout=self.layout.to(device))


class _Wanted(NamedTuple):
    positions: Tensor
    """Of the tokens that are trained; at least one."""
    num_inputs: int
    """Tokens of it that the model must read."""
    ends: bool
    """Whether these are all, for what follows the last one."""


@dataclass
class _Piece:
    """Segments of one group that go into one pack."""

    group: int
    chosen: list[int] = field(default_factory=list)
    num_tokens: int = 0


def pack_groups(
    groups: Sequence[Group],
    token_budget: int,
    *,
    train: Sequence[Tensor] | None = None,
    ends: Sequence[Tensor] | None = None,
    share_prompt: bool = True,
) -> list[Pack]:
    """Micro-batches of about token_budget input tokens each; the same input gives the same packs.

    train: for each group a bool [G], which completions to train; None: all. ends: likewise, which
    of these have their last token among the inputs; None: none. Completions are never cut, and
    those of one group stay together while they fit; a group that does not fit is split, and its
    prompt repeated. A completion that exceeds the budget alone makes a pack of its own. The
    segments of an episode are packed as completions are; one that brings its own prompt stands
    alone.
    share_prompt False: each completion brings its own copy of the prompt, for comparison.
    Tokens of mask 0, such as a tool's answer, are inputs but no targets. Nothing to train: no pack.

    Raises UniRLError when the budget is no number of tokens, `train` or `ends` does not fit the
    groups, or a prompt is empty.
    """
    if token_budget < 1:
        raise UniRLError(
            f"a token budget of {token_budget}", "it must be >= 1", "4096 is a good beginning"
        )
    wanted = _wanted(groups, _flags("train", groups, train), _flags("ends", groups, ends))
    packs: list[list[_Piece]] = []
    room: list[int] = []
    pieces = [
        piece
        for index, group in enumerate(groups)
        for piece in _pieces(index, group, wanted[index], token_budget, share_prompt)
    ]
    # First fit, largest first: nearly as few packs as possible, and sorted: deterministic.
    for piece in sorted(pieces, key=lambda one: -one.num_tokens):
        for i, free in enumerate(room):
            if piece.num_tokens <= free:
                packs[i].append(piece)
                room[i] -= piece.num_tokens
                break
        else:
            packs.append([piece])
            room.append(token_budget - piece.num_tokens)
    return [_pack(groups, wanted, chosen, share_prompt) for chosen in packs]


def _flags(
    name: str, groups: Sequence[Group], flags: Sequence[Tensor] | None
) -> list[list[bool]] | None:
    if flags is None:
        return None
    if [one.numel() for one in flags] != [group.size for group in groups]:
        raise UniRLError(
            f"`{name}` has flags of {[one.numel() for one in flags]} completions",
            f"the groups have {[group.size for group in groups]}",
            "give one flag for each completion of each group",
        )
    return [one.tolist() for one in flags]


def _wanted(
    groups: Sequence[Group], train: list[list[bool]] | None, ends: list[list[bool]] | None
) -> list[dict[int, _Wanted]]:
    """For each group, by segment: what is wanted of it, if anything is trained."""
    wanted: list[dict[int, _Wanted]] = []
    for index, group in enumerate(groups):
        if group.prompt.numel() == 0:
            raise UniRLError(
                f"the prompt of group {group.ticket} is empty",
                "a prompt has at least one token: it predicts the first token of each completion",
                "begin prompts with the tokenizer's bos token",
            )
        found: dict[int, _Wanted] = {}
        owner = group.owner.tolist()
        last = {each: c for c, each in enumerate(owner)}
        for c, mask in enumerate(torch.split(group.mask, group.lengths.tolist())):
            if train is not None and not train[index][owner[c]]:
                continue
            positions = mask.nonzero().flatten()
            if positions.numel():
                whole = ends is not None and ends[index][owner[c]] and last[owner[c]] == c
                # The last token trained is predicted, not an input; nor is what stands behind it.
                num_inputs = mask.numel() if whole else int(positions[-1])
                found[c] = _Wanted(positions, num_inputs, whole)
        wanted.append(found)
    return wanted


def _pieces(
    index: int, group: Group, wanted: dict[int, _Wanted], budget: int, share: bool
) -> list[_Piece]:
    prompt = group.prompt.numel()
    inputs = {c: one.num_inputs for c, one in wanted.items()}
    pieces: list[_Piece] = []
    for c in sorted(inputs, key=lambda c: -inputs[c]):
        alone = inputs[c] + (prompt if _continues(group, c) else 0)
        more = inputs[c] if share else alone
        if not pieces or pieces[-1].num_tokens + more > budget:
            pieces.append(_Piece(index))
            more = alone
        pieces[-1].chosen.append(c)
        pieces[-1].num_tokens += more
    return pieces


def _continues(group: Group, segment: int) -> bool:
    """Whether it continues the group's prompt."""
    return group.shared is None or bool(group.shared[segment])


class _Document(NamedTuple):
    """What one row of the layout holds."""

    group: int
    segment: int
    """-1: the prompt alone."""
    tokens: Tensor
    prompt_row: int | None
    """Which row the prompt is; None: it is in this one."""
    num_ahead: int = 0
    """Tokens of this row before the segment's."""


def _pack(
    groups: Sequence[Group],
    wanted: list[dict[int, _Wanted]],
    pieces: list[_Piece],
    share: bool,
) -> Pack:
    documents = _documents(groups, wanted, pieces, share)
    rows = [Row(one.tokens.numel(), one.prompt_row) for one in documents]
    layout, order = lay_out(rows)
    start, num_tokens = [0] * len(rows), 0
    for i in order:
        start[i] = num_tokens
        num_tokens += rows[i].length
    # A completion continues counting where its prompt ended.
    ahead = [0 if row.prompt is None else rows[row.prompt].length for row in rows]
    positions = [torch.arange(rows[i].length) + ahead[i] for i in order]
    first_sequence = [0, *accumulate(group.size for group in groups)]
    first_token = [0, *accumulate(group.token.numel() for group in groups)]
    targets: list[tuple[Tensor, ...]] = []
    ends: list[tuple[int, int]] = []
    for i, (g, c, _, prompt_row, num_ahead) in enumerate(documents):
        if c < 0:
            continue
        group, where = groups[g], wanted[g][c].positions
        if prompt_row is None:
            source = where + (start[i] + num_ahead - 1)
        else:
            last = start[prompt_row] + rows[prompt_row].length - 1
            source = torch.where(where == 0, last, where + (start[i] - 1))
        if wanted[g][c].ends:
            ends.append((start[i] + rows[i].length - 1, first_sequence[g] + int(group.owner[c])))
        in_group = where + int(group.starts[c])
        number = torch.full_like(where, first_sequence[g] + int(group.owner[c]))
        targets.append((source, group.token[in_group], number, where, in_group + first_token[g]))
    source, target, sequence, position, flat = map(torch.cat, zip(*targets, strict=True))
    end, end_sequence = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return Pack(
        input_ids=torch.cat([documents[i].tokens for i in order]).long()[None],
        position_ids=torch.cat(positions)[None],
        layout=layout,
        source=source,
        target=target.long(),
        sequence=sequence,
        position=position,
        flat=flat,
        end=end,
        end_sequence=end_sequence,
    )


def _documents(
    groups: Sequence[Group],
    wanted: list[dict[int, _Wanted]],
    pieces: list[_Piece],
    share: bool,
) -> list[_Document]:
    """The rows of a pack, a shared prompt before its completions."""
    # Two pieces of one group may have met again in one pack.
    chosen: dict[int, list[int]] = {}
    for piece in pieces:
        chosen.setdefault(piece.group, []).extend(piece.chosen)
    documents: list[_Document] = []
    for g, segments in chosen.items():
        group, prompt_row, num_prompt = groups[g], None, groups[g].prompt.numel()
        if share and any(_continues(group, c) for c in segments):
            prompt_row = len(documents)
            documents.append(_Document(g, -1, group.prompt, None))
        for c in segments:
            begin = int(group.starts[c])
            tokens = group.token[begin : begin + wanted[g][c].num_inputs]
            if not _continues(group, c):
                documents.append(_Document(g, c, tokens, None))
            elif share:
                documents.append(_Document(g, c, tokens, prompt_row))
            else:
                whole = torch.cat([group.prompt, tokens])
                documents.append(_Document(g, c, whole, None, num_prompt))
    return documents
