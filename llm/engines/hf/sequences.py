"""What the embedded engine knows of the sequences it generates: arrays with one row per sequence,
on the host, so that a step costs the same few calls for any number of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unirl.llm.engine import Completion, Finish, Request
from unirl.llm.engines.decoding import seed_keys, uniforms

_MASK = (1 << 64) - 1
_CELLS = (("token", np.int64), ("logp", np.float64), ("version", np.int64))


@dataclass(eq=False)
class Running:
    """A request in flight, and the future that its caller awaits."""

    request: Request
    order: int
    future: asyncio.Future[Completion]
    is_mixed: bool = False
    """Weights were swapped since it entered the cache: some of its keys and values are older."""

    def end(self, completion: Completion) -> None:
        """Give the caller the completion, unless it waits no more."""
        if not self.future.done():
            self.future.set_result(completion)


class SequenceTable:
    """Rows 0 .. n-1 are sequences being generated; ended ones are replaced by the last."""

    def __init__(self) -> None:
        self.running: list[Running] = []
        self._row: dict[str, Any] = {
            "length": np.zeros(0, np.int64),  # tokens in the cache
            "count": np.zeros(0, np.int64),  # tokens of the completion
            "limit": np.zeros(0, np.int64),  # tokens the completion may have
            "turn": np.zeros(0, np.int64),  # tokens of it before this turn
            "last": np.zeros(0, np.int64),  # drawn, but not in the cache yet
            "key": np.zeros(0, np.uint64),
            "temperature": np.zeros(0, np.float64),
            "top_k": np.zeros(0, np.int64),
            "top_p": np.zeros(0, np.float64),
        }
        self._cells: dict[str, Any] = {name: np.zeros((0, 0), dtype) for name, dtype in _CELLS}
        self._stopping = 0

    def __len__(self) -> int:
        return len(self.running)

    @property
    def length(self) -> Any:
        """Tokens in the cache: [n], int64."""
        return self._row["length"][: len(self)]

    @property
    def last(self) -> Any:
        return self._row["last"][: len(self)]

    @property
    def stopping(self) -> list[int]:
        if not self._stopping:
            return []
        return [row for row, one in enumerate(self.running) if one.request.sampling.stop]

    def add(self, new: list[Running], context: int, turns: list[int]) -> None:
        """Append rows; their documents are in the cache, their first token is still to be drawn.
        turns: where stop texts may begin, in each.
        """
        first, total = len(self), len(self) + len(new)
        self._reserve(total)
        sampling = [one.request.sampling for one in new]
        lengths = [len(one.request.document) for one in new]
        prompts = [len(one.request.prompt) for one in new]
        values = {
            "length": lengths,
            "count": [have - prompt for have, prompt in zip(lengths, prompts, strict=True)],
            "limit": [
                min(one.max_tokens, context - prompt)
                for one, prompt in zip(sampling, prompts, strict=True)
            ],
            "turn": turns,
            "temperature": [one.temperature for one in sampling],
            "top_k": [one.top_k for one in sampling],
            "top_p": [one.top_p for one in sampling],
        }
        for name, value in values.items():
            self._row[name][first:total] = value
        seeds = [one.request.seed & _MASK for one in new]
        self._row["key"][first:total] = seed_keys(np.array(seeds, np.uint64))
        for row, one in enumerate(new, first):
            if one.request.partial is not None:
                self._restore(row, one.request.partial)
        self.running.extend(new)
        self._stopping += sum(bool(one.stop) for one in sampling)

    def uniforms(self, first: int, device: torch.device) -> Tensor:
        """The random number of the next token of each row from `first` on: float64."""
        rows = slice(first, len(self))
        return torch.from_numpy(uniforms(self._row["key"][rows], self._row["count"][rows])).to(
            device
        )

    def filters(self, first: int, device: torch.device) -> dict[str, Tensor]:
        """Keywords of `decoding.draw` for the rows from `first` on, without what no row uses."""
        found = {}
        for name, plain in (("temperature", 1), ("top_k", 0), ("top_p", 1)):
            value = self._row[name][first : len(self)]
            if (value != plain).any():
                found[name] = torch.from_numpy(value.copy()).to(device)
        return found

    def record(self, first: int, token: Any, logp: Any, version: int) -> Any:
        """One more token for each row from `first` on; returns which of them are full: [n]."""
        rows = slice(first, len(self))
        count = self._row["count"]
        every, column = np.arange(first, len(self)), count[rows]
        if int(column.max()) >= self._cells["token"].shape[1]:
            self._widen(int(column.max()) + 1)
        self._cells["token"][every, column] = token
        self._cells["logp"][every, column] = logp
        self._cells["version"][every, column] = version
        self._row["last"][rows] = token
        count[rows] += 1
        return count[rows] >= self._row["limit"][rows]

    def tail(self, row: int, tokens: int) -> list[int]:
        """The last of this turn, at most so many."""
        count, turn = int(self._row["count"][row]), int(self._row["turn"][row])
        result: list[int] = self._cells["token"][row, max(turn, count - tokens) : count].tolist()
        return result

    def completion(self, row: int, finish: Finish) -> Completion:
        count = int(self._row["count"][row])
        token, logp, version = (
            tuple(self._cells[name][row, :count].tolist()) for name, _ in _CELLS
        )
        partial = self.running[row].request.partial
        drawn = partial.drawn if partial is not None else ()
        drawn = drawn and drawn + (True,) * (count - len(drawn))
        return Completion(token, logp, version, finish, drawn)

    def remove(self, gone: list[int]) -> tuple[list[int], list[int]]:
        """Take rows out; returns which rows were copied over which, for the cache to follow."""
        self._stopping -= sum(bool(self.running[row].request.sampling.stop) for row in gone)
        left, dead = len(self) - len(gone), set(gone)
        targets = [row for row in gone if row < left]
        sources = [row for row in range(left, len(self)) if row not in dead]
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running[source]
        del self.running[left:]
        if sources:
            for value in (*self._row.values(), *self._cells.values()):
                value[targets] = value[sources]
        return sources, targets

    def _restore(self, row: int, partial: Completion) -> None:
        count = len(partial.tokens)
        if count > self._cells["token"].shape[1]:
            self._widen(count)
        for name, values in (
            ("token", partial.tokens),
            ("logp", partial.logp),
            ("version", partial.version),
        ):
            self._cells[name][row, :count] = values

    def _reserve(self, rows: int) -> None:
        have = len(self._row["length"])
        if rows > have:
            more = max(rows, 2 * have) - have
            for name, value in self._row.items():
                self._row[name] = np.pad(value, (0, more))
            for name, value in self._cells.items():
                self._cells[name] = np.pad(value, ((0, more), (0, 0)))

    def _widen(self, tokens: int) -> None:
        have = self._cells["token"].shape[1]
        more = max(tokens, 2 * have, 32) - have
        for name, value in self._cells.items():
            self._cells[name] = np.pad(value, ((0, 0), (0, more)))
