"""Which example is the n-th: a function of the seed and of n, so that a resumed run needs no more
than the next n.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from unirl.core.seeding import derive_seed
from unirl.llm.tasks.task import Indices, permutation

_BLOCK = 4096


class PromptOrder:
    """Deals tickets out to tasks by weight, and each task's share to its examples, epoch by epoch.

    sizes: examples of each task; weights: their shares, summing to 1. One task goes through its
    examples in a new order each epoch, every one exactly once; so does each task of a mix.
    """

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], weights: Sequence[float], seed: int
    ) -> None:
        self._names, self._sizes, self._seed = tuple(names), tuple(sizes), seed
        self._bounds = np.cumsum(weights)[:-1]
        # How often each task was drawn before block b: _before[b].
        self._before: list[Indices] = [np.zeros(len(self._sizes), dtype=np.int64)]
        self._drawn = lru_cache(maxsize=16)(self._draw)
        # Tickets in flight together may be in two epochs.
        self._shuffled = lru_cache(maxsize=2 + 2 * len(self._sizes))(permutation)

    def locate(self, ticket: int) -> tuple[int, int, int]:
        """Task, example and epoch of a ticket >= 0."""
        if ticket < 0:
            raise ValueError(f"ticket is {ticket}, it must be >= 0")
        task, position = self._deal(ticket)
        epoch, offset = divmod(position, self._sizes[task])
        seed = derive_seed(self._seed, self._names[task], epoch)
        return task, int(self._shuffled(seed, self._sizes[task])[offset]), epoch

    def _deal(self, ticket: int) -> tuple[int, int]:
        """The task of a ticket, and how many tickets before it went to this task."""
        if len(self._sizes) == 1:
            return 0, ticket
        block, offset = divmod(ticket, _BLOCK)
        while len(self._before) <= block:
            drawn = self._draw(len(self._before) - 1)
            counts = np.bincount(drawn, minlength=len(self._sizes))
            self._before.append(self._before[-1] + counts)
        drawn = self._drawn(block)
        task = int(drawn[offset])
        return task, int(self._before[block][task] + np.count_nonzero(drawn[:offset] == task))

    def _draw(self, block: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        raw = np.random.Philox(key=derive_seed(self._seed, "mix", block)).random_raw(_BLOCK)
        uniform = (raw >> np.uint64(11)) * 2.0**-53
        return np.searchsorted(self._bounds, uniform, side="right")
