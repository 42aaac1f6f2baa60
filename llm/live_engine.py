"""A run's engine as its users share it: started with the first of them, brought up to date while
they draw, asleep while there are none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from unirl.core.sample import Slot
from unirl.core.weights import Weights, WeightStore
from unirl.device import copy_weights
from unirl.errors import UniRLError
from unirl.llm.engine import Engine, EngineFailed


class LiveEngine:
    """sleeps: the engine gives its memory back while nobody has it awake."""

    def __init__(self, engine: Engine, weights: WeightStore, sleeps: bool) -> None:
        self.engine, self._weights, self._sleeps = engine, weights, sleeps
        self._swap, self._incoming = asyncio.Lock(), Incoming(weights)
        self._failure: UniRLError | EngineFailed | None = None
        self._num_open = self._num_drawing = 0
        self._retries = self._computed = self._reported_at = 0.0
        """Of the engine, as far as they are reported; and when that was."""

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if self._sleeps and self._num_open == 0:
                await self.engine.sleep()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around what asks the engine for tokens: new weights pause it while there is any."""
        self._num_drawing += 1
        try:
            yield
        finally:
            self._num_drawing -= 1

    def label(self, slot: Slot, versions: Sequence[int], started: float, generated: float) -> None:
        """Write into a finished slot how it came about. versions: of the tokens that were drawn;
        started, generated: when its generation began and ended, by time.monotonic.
        """
        slot.data["generate_seconds"].fill_(generated - started)
        slot.data["reward_seconds"].fill_(time.monotonic() - generated)
        self._report_engine(slot, started)
        slot.first_version = min(versions, default=self.engine.version)
        slot.last_version = max(versions, default=self.engine.version)

    def _report_engine(self, slot: Slot, started: float) -> None:
        """What it counted since the slot before."""
        stats, now = self.engine.stats(), time.monotonic()
        retries, computed = stats.get("retries", 0.0), stats.get("compute_seconds", 0.0)
        slot.data["retries"].fill_(retries - self._retries)
        slot.data["compute_seconds"].fill_(computed - self._computed)
        since = now - (self._reported_at or started)
        slot.data["engine_seconds"].fill_(since if "compute_seconds" in stats else 0.0)
        self._retries, self._computed, self._reported_at = retries, computed, now

    async def refresh(self) -> None:
        """Give the engine the newest weights; completions in flight continue with them."""
        async with self._swap:
            if self._failure is not None:
                raise self._failure
            try:
                await self._bring_up_to_date()
            except (UniRLError, EngineFailed) as error:
                # Others wait to do the same: none shall start a broken engine once more.
                self._failure = error
                raise

    async def _bring_up_to_date(self) -> None:
        engine = self.engine
        await engine.start()
        if self._sleeps:
            await engine.wake()
        version = self._weights.pull(self._incoming, engine.version)
        if version == engine.version:
            return
        busy = self._num_drawing > 0
        if busy:
            await engine.pause("keep")
        await engine.load_weights(self._incoming.weights, version)
        if busy:
            await engine.resume()


class Incoming:
    """Weights on their way from the store to an engine that takes its time: a copy, reused; none
    where the store lends.
    """

    def __init__(self, store: WeightStore) -> None:
        self.weights: Weights = {}
        self._lent = store.lends

    def load_weights(self, weights: Weights) -> None:
        if self._lent:
            self.weights = weights
        elif not self.weights:
            self.weights = {name: value.detach().clone() for name, value in weights.items()}
        else:
            copy_weights(self.weights, weights)
