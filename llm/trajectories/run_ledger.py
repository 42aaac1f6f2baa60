"""A run's tickets marked in its store, behind the updates that learned from them: a thread of the
learner's process, with a connection of its own.

Marks are kept until they are written: a store that fails for a while has them all when it is
there again. `flush` gives up at the first attempt that fails, so that a broken store costs each
checkpoint one attempt, and not its deadline.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from unirl.errors import UniRLError
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.databases.database import StoreFailed
from unirl.llm.trajectories.ledger import Ledger
from unirl.llm.trajectories.store import TrajectoryStore, open_store

log = logging.getLogger(__name__)

MOST_UPDATES = 10_000
"""That may wait; of more the oldest are lost and counted."""
TOGETHER = 256
"""Updates of a transaction."""
FLUSH_SECONDS = 30.0
GATHER_SECONDS = 0.2
AGAIN_SECONDS = 1.0
"""Between attempts where one has failed."""


class Marks(Protocol):
    """How a run's tickets are marked. Called by one thread at a time."""

    def mark(self, updates: Sequence[tuple[Sequence[int], int]]) -> int:
        """(tickets, update), in one transaction; how many were not marked before."""

    def take_back(self, update: int) -> int:
        """Those of later updates; how many tickets."""

    def num_updates(self) -> int | None:
        """See TicketLedger."""


class OwnMarks:
    """Of the tickets that a run produced itself."""

    def __init__(self, ledger: Ledger, run: str) -> None:
        self._ledger, self._run = ledger, run

    def mark(self, updates: Sequence[tuple[Sequence[int], int]]) -> int:
        return len(self._ledger.mark_updates(self._run, updates))

    def take_back(self, update: int) -> int:
        return len(self._ledger.release_after(self._run, update))

    def num_updates(self) -> int | None:
        return None


class RunLedger:
    """A TicketLedger. Owns the store. is_required: what cannot be marked ends the run."""

    def __init__(self, store: TrajectoryStore, marks: Marks, *, is_required: bool = False) -> None:
        self._store, self._marks, self._is_required = store, marks, is_required
        store.database.wait_for_disk()
        self.num_updates: int | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Sequence[int], int]] = deque()
        self._is_busy = self._is_closing = self._is_wanted = False
        self._error: Exception | None = None
        """Of the newest attempt."""
        self._num_failures = 0
        self._counts = {"marked": 0, "trained_twice": 0, "unmarked": 0}
        self._thread = threading.Thread(target=self._write_behind, name="ledger", daemon=True)
        self._thread.start()

    def trained(self, tickets: Sequence[int], update: int) -> None:
        with self._changed:
            if len(self._waiting) == MOST_UPDATES:
                self._counts["unmarked"] += len(self._waiting.popleft()[0])
            self._waiting.append((tuple(tickets), update))
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            failures = self._num_failures
            self._is_wanted = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._is_pending or self._num_failures > failures, FLUSH_SECONDS
            )
            if not self._is_pending:
                return
            size, why = len(self._waiting), self._error or f"it took over {FLUSH_SECONDS:g} s"
        if self._is_required:
            raise UniRLError(
                f"{size} updates could not be marked in the store of trajectories",
                f"store.required is true, and a checkpoint must not be ahead of the store: {why}",
                "see that it can be written, then continue the run: unirl resume",
            )
        log.warning("%d updates are not marked in the store of trajectories: %s", size, why)

    def released_after(self, update: int) -> None:
        try:
            found = self._marks.take_back(update)
            self.num_updates = self._marks.num_updates()
        except StoreFailed as error:
            if self._is_required:
                raise
            log.warning("Marks of later updates stay in the store of trajectories: %s", error)
            return
        if found:
            log.info("%d tickets of after update %d are learned from again", found, update)

    def stats(self) -> Mapping[str, float]:
        with self._changed:
            return {f"store/{name}": float(number) for name, number in self._counts.items()}

    def close(self) -> None:
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(FLUSH_SECONDS)
        if not self._thread.is_alive():  # else it has the connection
            self._store.close()
        if self._waiting:
            log.warning("%d updates were not marked in the store", len(self._waiting))

    @property
    def _is_pending(self) -> bool:
        return bool(self._waiting) or self._is_busy

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closing)
                # Each transaction waits for the disk: those of fast updates are made together.
                pause = GATHER_SECONDS if self._error is None else AGAIN_SECONDS
                self._changed.wait_for(lambda: self._is_wanted or self._is_closing, pause)
                chunk = [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]
                if not chunk:
                    return
                self._is_busy, self._is_wanted = True, False
            error = self._write(chunk)
            with self._changed:
                self._is_busy, self._error = False, error
                if error is not None:
                    self._waiting.extendleft(reversed(chunk))
                    self._num_failures += 1
                self._changed.notify_all()
                if error is not None and self._is_closing:
                    return

    def _write(self, chunk: Sequence[tuple[Sequence[int], int]]) -> Exception | None:
        try:
            marked = self._marks.mark(chunk)
        except Exception as error:  # whatever it is, it must not end the run
            return error
        with self._changed:
            self._counts["marked"] += marked
            self._counts["trained_twice"] += sum(len(each) for each, _ in chunk) - marked
        return None


def make_ledger(folder: Path, *, config: StoreConfig) -> RunLedger | None:
    """None where nothing is to be kept, or cannot be."""
    if not config.enabled:
        return None
    try:
        store = open_store(config, folder)
        marks = OwnMarks(Ledger(store), config.run_name(folder))
        return RunLedger(store, marks, is_required=config.required)
    except UniRLError as error:
        if config.required:
            raise
        log.warning("Tickets are not marked as learned from: %s", error)
        return None
