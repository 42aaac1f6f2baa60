"""The tickets of a run that learns from a store, marked in that store: as groups that consumers
hold, one consumer for each ticket.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unirl.errors import UniRLError
from unirl.llm.replay.stored_groups import LEASE_SECONDS, StoredGroups, consumer_of
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.ledger import Ledger
from unirl.llm.trajectories.run_ledger import RunLedger


class LeasedMarks:
    """batch_size: groups of an update."""

    def __init__(self, ledger: Ledger, consumer: str, run: str | None, batch_size: int) -> None:
        self._ledger, self._consumer, self._run = ledger, consumer, run
        self._batch_size = batch_size

    def mark(self, updates: Sequence[tuple[Sequence[int], int]]) -> int:
        return self._ledger.acknowledge_held(
            [(f"{self._consumer}{ticket}", update) for tickets, update in updates
             for ticket in tickets]
        )  # fmt: skip

    def take_back(self, update: int) -> int:
        return self._ledger.hold_again(self._consumer, update, seconds=LEASE_SECONDS)

    def num_updates(self) -> int:
        found = self._ledger.count_for(self._consumer, self._run)
        if found < self._batch_size:
            raise UniRLError(
                f"the store has {found} groups that nobody has learned from or holds",
                f"an update learns from queue.batch_size = {self._batch_size}",
                "make more: unirl train agent --only rollout; or learn from them again: "
                "--reuse-samples",
            )
        return found // self._batch_size


def make_leases(folder: Path, *, samples: str, config: StoreConfig, batch_size: int) -> RunLedger:
    """folder: of the run that learns. Raises UniRLError where its store cannot be opened: nothing
    could be learned from it either.
    """
    found = StoredGroups.find(Path(samples).expanduser(), config)
    store = found.open()
    marks = LeasedMarks(Ledger(store), consumer_of(folder), found.run, batch_size)
    return RunLedger(store, marks, is_required=True)
