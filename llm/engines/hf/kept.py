"""Prefix cache of the embedded engine: keys and values of sequences that have ended, for requests
that begin with their tokens, as the next turn of an episode does.

What is kept of a token depends on the weights and on the tokens before it alone, so any beginning
that two sequences share can be copied. The owner clears it when the weights change.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import NamedTuple

from torch import Tensor

from unirl.llm.engines.hf.kv_cache import KeyValueCache

_WORTH = 5
"""A beginning is used where what follows is at most so many times as long. Attention that reads it
back is slower than that of a whole prompt, and without it a fifth more is computed at most.
"""


class Document(NamedTuple):
    """What is in the context of a sequence before its first token is drawn."""

    tokens: tuple[int, ...]
    beginning: Tensor | None
    """Keys and values of its first n tokens: [layers, 2, heads, n, head_size]; None: of none."""

    @property
    def num_kept(self) -> int:
        """n."""
        return 0 if self.beginning is None else self.beginning.shape[3]

    @property
    def num_new(self) -> int:
        """Tokens that are still to be computed: 1 at least, for its logits."""
        return len(self.tokens) - self.num_kept


class PrefixCache:
    """Ended sequences of at most `num_bytes` together; the one that was not used for longest goes
    first.
    """

    def __init__(self, num_bytes: int) -> None:
        self._limit, self._bytes = num_bytes, 0
        self._sorted: list[tuple[int, ...]] = []
        """Their tokens. The one that shares the longest beginning with others stands next to them
        in this order.
        """
        self._cells: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def num_bytes(self) -> int:
        """That it holds now."""
        return self._bytes

    def look_up(self, tokens: tuple[int, ...]) -> Document:
        """With the longest beginning that is kept, where that is worth it."""
        at = bisect_left(self._sorted, tokens)
        near = self._sorted[max(0, at - 1) : at + 1]
        if not near:
            return Document(tokens, None)
        found = max(near, key=lambda each: _shared(each, tokens))
        shared = min(_shared(found, tokens), len(tokens) - 1)
        if shared * _WORTH < len(tokens) - shared:
            return Document(tokens, None)
        self._cells.move_to_end(found)
        return Document(tokens, self._cells[found][:, :, :, :shared])

    def keep(self, tokens: tuple[int, ...], cache: KeyValueCache, row: int) -> None:
        """A copy of what this row holds of these tokens."""
        size = cache.bytes_of(len(tokens))
        if size > self._limit:
            return
        at = bisect_left(self._sorted, tokens)
        if at < len(self) and self._sorted[at][: len(tokens)] == tokens:
            return  # all of it is the beginning of one that is there
        if at and tokens[: len(before := self._sorted[at - 1])] == before:
            self._drop(before)  # as the turn before is the beginning of these
        while self._bytes + size > self._limit:
            self._drop(next(iter(self._cells)))
        insort(self._sorted, tokens)
        self._cells[tokens] = cache.copy_of(row, len(tokens))
        self._bytes += size

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._sorted.clear()
        self._cells.clear()
        self._bytes = 0

    def _drop(self, tokens: tuple[int, ...]) -> None:
        cells = self._cells.pop(tokens)
        self._bytes -= cells.numel() * cells.element_size()
        del self._sorted[bisect_left(self._sorted, tokens)]


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])
