"""Groups of completions become micro-batches without padding, in which a prompt is computed once
for all completions of its group.

Rows whose advantage is zero are left out by the caller; what only pads, or predicts nothing that is
trained, is never computed: no logits of the prompt, no token behind the last one trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from unirl.core.errors import UniRLError
from unirl.llm.group import Group
from unirl.llm.training.packed_layout import Layout, Row, place


@dataclass(frozen=True)
class Pack:
    """One micro-batch: N input tokens, and M tokens to be predicted.

    The completions of a batch are numbered through all its groups, also those left out; so are
    their tokens, in the order of torch.cat([group.token for group in groups]).
    """

    input_ids: Tensor
    """[1, N]"""
    position_ids: Tensor
    """[1, N]: counted from 0 in every prompt; every completion of it goes on there."""
    layout: Layout
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

    @property
    def num_tokens(self) -> int:
        """N: what the model computes."""
        return self.input_ids.shape[1]

    @property
    def num_targets(self) -> int:
        """M: what is trained."""
        return self.target.numel()

    def to(self, device: torch.device | str) -> Pack:
        """The same on another device."""
        names = ("input_ids", "position_ids", "source", "target", "sequence", "position", "flat")
        return replace(
            self,
            layout=self.layout.to(device),
            **{name: getattr(self, name).to(device) for name in names},
        )


@dataclass
class _Piece:
    """Completions of one group that go into one pack."""

    group: int
    chosen: list[int] = field(default_factory=list)
    num_tokens: int = 0


def pack_groups(
    groups: Sequence[Group],
    token_budget: int,
    *,
    train: Sequence[Tensor] | None = None,
    share_prompt: bool = True,
) -> list[Pack]:
    """Micro-batches of about token_budget input tokens each; the same input gives the same packs.

    train: for each group a bool [G], which completions to train; None: all. Completions are never
    cut, and those of one group stay together while they fit; a group that does not fit is split,
    and its prompt repeated. A completion that exceeds the budget alone makes a pack of its own.
    share_prompt False: each completion brings its own copy of the prompt, for comparison.
    Tokens of mask 0, such as a tool's answer, are inputs but no targets. Nothing to train: no pack.

    Raises UniRLError when the budget is no number of tokens, `train` does not fit the groups, or a
    prompt is empty.
    """
    if token_budget < 1:
        raise UniRLError(
            f"a token budget of {token_budget}", "it must be >= 1", "4096 is a good beginning"
        )
    wanted = _wanted(groups, train)
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


def _wanted(groups: Sequence[Group], train: Sequence[Tensor] | None) -> list[dict[int, Tensor]]:
    """For each group, by completion: the positions of its tokens that are trained, if any."""
    if train is not None and [one.numel() for one in train] != [group.size for group in groups]:
        raise UniRLError(
            f"`train` says of {[one.numel() for one in train]} completions what to train",
            f"the groups have {[group.size for group in groups]}",
            "give one flag for each completion of each group",
        )
    wanted: list[dict[int, Tensor]] = []
    for index, group in enumerate(groups):
        if group.prompt.numel() == 0:
            raise UniRLError(
                f"the prompt of group {group.ticket} is empty",
                "a prompt has at least one token: it predicts the first token of each completion",
                "begin prompts with the tokenizer's bos token",
            )
        masks = torch.split(group.mask, group.lengths.tolist())
        chosen = [True] * group.size if train is None else train[index].tolist()
        found = {c: mask.nonzero().flatten() for c, mask in enumerate(masks) if chosen[c]}
        wanted.append({c: positions for c, positions in found.items() if positions.numel()})
    return wanted


def _pieces(
    index: int, group: Group, wanted: dict[int, Tensor], budget: int, share: bool
) -> list[_Piece]:
    prompt = group.prompt.numel()
    # The last token trained is predicted, not an input; nor is what stands behind it.
    inputs = {c: int(positions[-1]) for c, positions in wanted.items()}
    pieces: list[_Piece] = []
    for c in sorted(inputs, key=lambda c: -inputs[c]):
        alone = inputs[c] + prompt
        more = inputs[c] if share else alone
        if not pieces or pieces[-1].num_tokens + more > budget:
            pieces.append(_Piece(index))
            more = alone
        pieces[-1].chosen.append(c)
        pieces[-1].num_tokens += more
    return pieces


class _Document(NamedTuple):
    """What one row of the layout holds."""

    group: int
    completion: int
    """-1: the prompt alone."""
    tokens: Tensor
    prompt_row: int | None
    """Where the prompt stands, if it is not part of this row."""


def _pack(
    groups: Sequence[Group],
    wanted: list[dict[int, Tensor]],
    pieces: list[_Piece],
    share: bool,
) -> Pack:
    documents = _documents(groups, wanted, pieces, share)
    rows = [Row(one.tokens.numel(), one.prompt_row) for one in documents]
    layout, order = place(rows)
    start, num_tokens = [0] * len(rows), 0
    for i in order:
        start[i] = num_tokens
        num_tokens += rows[i].length
    # A completion goes on counting where its prompt ended.
    ahead = [0 if row.prompt is None else rows[row.prompt].length for row in rows]
    positions = [torch.arange(rows[i].length) + ahead[i] for i in order]
    first_sequence = [0, *accumulate(group.size for group in groups)]
    first_token = [0, *accumulate(group.token.numel() for group in groups)]
    parts: list[tuple[Tensor, ...]] = []
    for i, (g, c, _, prompt_row) in enumerate(documents):
        if c < 0:
            continue
        group, where = groups[g], wanted[g][c]
        if prompt_row is None:
            source = where + (start[i] + group.prompt.numel() - 1)
        else:
            last = start[prompt_row] + rows[prompt_row].length - 1
            source = torch.where(where == 0, last, where + (start[i] - 1))
        in_group = where + int(group.starts[c])
        number = torch.full_like(where, first_sequence[g] + c)
        parts.append((source, group.token[in_group], number, where, in_group + first_token[g]))
    source, target, sequence, position, flat = map(torch.cat, zip(*parts, strict=True))
    return Pack(
        input_ids=torch.cat([documents[i].tokens for i in order]).long()[None],
        position_ids=torch.cat(positions)[None],
        layout=layout,
        source=source,
        target=target.long(),
        sequence=sequence,
        position=position,
        flat=flat,
    )


def _documents(
    groups: Sequence[Group],
    wanted: list[dict[int, Tensor]],
    pieces: list[_Piece],
    share: bool,
) -> list[_Document]:
    """The rows of a pack, a shared prompt before its completions."""
    # Two pieces of one group may have met again in one pack.
    chosen: dict[int, list[int]] = {}
    for piece in pieces:
        chosen.setdefault(piece.group, []).extend(piece.chosen)
    documents: list[_Document] = []
    for g, completions in chosen.items():
        group, prompt_row = groups[g], None
        if share:
            prompt_row = len(documents)
            documents.append(_Document(g, -1, group.prompt, None))
        for c in completions:
            begin = int(group.starts[c])
            tokens = group.token[begin : begin + int(wanted[g][c][-1])]
            if not share:
                tokens = torch.cat([group.prompt, tokens])
            documents.append(_Document(g, c, tokens, prompt_row))
    return documents
