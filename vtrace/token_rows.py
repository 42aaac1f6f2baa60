"""Packed tokens as rows of time: what the recursions of targets.py run on.

Packed: all tokens of S completions one after the other, [N], with the index of the completion of
each. Rows: [T, S]. Only tokens that the policy drew (mask 1) get a row, in their order: tokens of a
tool or a prompt are skipped, as if the next drawn token followed at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenRows(NamedTuple):
    """Where each drawn token stands among the rows. K tokens are drawn."""

    token: Tensor
    """[K]: its index among the packed tokens."""
    time: Tensor
    """[K]: its row."""
    completion: Tensor
    """[K]: its column."""
    num_drawn: Tensor
    """[S]: rows of each completion."""
    mask: Tensor
    """[T, S], True where there is a token."""

    def spread(self, values: Tensor) -> Tensor:
        """Packed values [N] as rows [T, S]; 0 elsewhere."""
        rows = values.new_zeros(self.mask.shape)
        rows[self.time, self.completion] = values[self.token]
        return rows

    def pack(self, rows: Tensor, like: Tensor) -> Tensor:
        """Rows [T, S] as packed values of the shape of `like`; 0 where no token was drawn."""
        packed = rows.new_zeros(like.shape)
        packed[self.token] = rows[self.time, self.completion]
        return packed

    def at_last(self, values: Tensor) -> Tensor:
        """Rows [T, S] with a completion's value [S] at its last drawn token; 0 elsewhere."""
        rows = values.new_zeros(self.mask.shape)
        some = self.num_drawn > 0
        column = torch.arange(values.numel(), device=values.device)[some]
        rows[self.num_drawn[some] - 1, column] = values[some]
        return rows


def token_rows(mask: Tensor, sequence: Tensor, num_sequences: int) -> TokenRows:
    """The rows of packed tokens. mask, sequence: [N]; T is the longest completion, at least 1."""
    check_tokens(mask, sequence, num_sequences)
    token = (mask != 0).nonzero().squeeze(1)
    completion = sequence[token]
    num_drawn = torch.bincount(completion, minlength=num_sequences)
    order = torch.argsort(completion, stable=True)
    starts = num_drawn.cumsum(0) - num_drawn
    time = torch.empty_like(completion)
    position = torch.arange(token.numel(), device=token.device)
    time[order] = position - starts[completion[order]]
    num_rows = max(1, int(num_drawn.max())) if num_sequences else 1
    rows = torch.arange(num_rows, device=mask.device)
    return TokenRows(token, time, completion, num_drawn, rows[:, None] < num_drawn)


def per_completion(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sums over the tokens of each completion, [S], of packed values [N]."""
    return values.new_zeros(num_sequences).index_add_(0, sequence, values)


def check_tokens(mask: Tensor, sequence: Tensor, num_sequences: int, **inputs: Tensor) -> None:
    """Raise ValueError unless everything is [N] like the mask; [N, 1] would broadcast."""
    if mask.dim() != 1:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but packed tokens are [N]. "
            "Flatten the batch and name each token's completion in sequence."
        )
    for name, tensor in {"sequence": sequence, **inputs}.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and mask {tuple(mask.shape)}: "
                "they must be equal. Give one entry per packed token."
            )
    if sequence.dtype != torch.int64:
        raise ValueError(
            f"sequence has dtype {sequence.dtype}, but indices of completions are int64. "
            "Convert with .long()."
        )
    if num_sequences < 0:
        raise ValueError(f"num_sequences is {num_sequences}, but it must be >= 0.")
