"""Who learned from which ticket, exactly once: a group is leased, acknowledged, trained.

    ledger.mark_trained("calculator", [7, 8], update=12)             # by the run itself
    for group in ledger.lease(2, "reader-1"): ...                    # by one that reads the store
    ledger.acknowledge("reader-1", groups, update=3)
    ledger.release_after("calculator", update=10)                    # resumed from update 10

The state of an episode changes in the same transaction as its ticket's lease. A mark may come
before the episode does, as the store is written behind the run: then it waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.trajectories.databases.database import StoreFailed
from unirl.llm.trajectories.record import NO_TICKET, Record
from unirl.llm.trajectories.store import TrajectoryStore

log = logging.getLogger(__name__)

LEARNER = "learner"
"""Consumer of a run's own tickets."""
_OF_CONSUMER = f"consumer = ? AND consumer <> '{LEARNER}' AND update_number IS NULL"
"""As the partial index has it."""


@dataclass(frozen=True)
class StoredGroup:
    """The episodes of a ticket, by their places."""

    run: str
    ticket: int
    records: tuple[Record, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.records[0].prompt


class Ledger:
    def __init__(self, store: TrajectoryStore) -> None:
        self._store, self._database = store, store.database

    def mark_trained(self, run: str, tickets: Iterable[int], update: int) -> list[int]:
        """These tickets were learned from at this update; returns those that are new: the others
        were marked before.
        """
        return self.mark_updates(run, [(tickets, update)])

    def mark_updates(self, run: str, updates: Sequence[tuple[Iterable[int], int]]) -> list[int]:
        """As `mark_trained`, for several updates in one transaction: (tickets, update)."""
        wanted = sorted({(update, ticket) for tickets, update in updates for ticket in tickets})
        marked = []
        with self._store.transaction():
            number = self._store.run_id(run)
            self._database.lock_tickets(number, [ticket for _, ticket in wanted])
            for update, ticket in wanted:
                found = self._database.execute(
                    "INSERT INTO lease (run, ticket, consumer, update_number) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (run, ticket) DO UPDATE SET consumer = excluded.consumer, "
                    "update_number = excluded.update_number, until = NULL "
                    "WHERE lease.update_number IS NULL RETURNING ticket",
                    [number, ticket, LEARNER, update],
                )
                if found:
                    marked.append(ticket)
                    self._set(number, ticket, ("done", "leased"), "trained", update)
        return marked

    def release_after(self, run: str, update: int) -> list[int]:
        """The run was resumed from this update: what later ones had learned from is not learned.
        Returns these tickets.
        """
        with self._store.transaction():
            number = self._store.run_id(run)
            rows = self._database.execute(
                "DELETE FROM lease WHERE run = ? AND update_number > ? RETURNING ticket",
                [number, update],
            )
            for (ticket,) in rows:
                self._set(number, ticket, ("trained",), "done", None)
        return sorted(row[0] for row in rows)

    def lease(
        self, size: int, consumer: str, *, run: str | None = None, seconds: float = 600.0
    ) -> list[StoredGroup]:
        """At most so many whole groups that nobody has learned from or holds; for so long."""
        taken: list[tuple[int, list[int]]] = []
        with self._store.transaction():
            self._free("until < ?", [time.time()])
            for number, ticket in self._candidates(4 * size + 16, run):
                rows = self._database.execute(
                    "SELECT id, group_size FROM episode WHERE run = ? AND ticket = ? "
                    "AND state = 'done' AND body_size IS NOT NULL ORDER BY place "
                    + self._database.skip_locked,
                    [number, ticket],
                )
                if not rows or len(rows) < rows[0][1]:
                    continue  # another consumer has it
                self._database.execute(
                    "INSERT INTO lease (run, ticket, consumer, until) VALUES (?, ?, ?, ?)",
                    [number, ticket, consumer, time.time() + seconds],
                )
                self._set(number, ticket, ("done",), "leased", None)
                taken.append((ticket, [row[0] for row in rows]))
                if len(taken) == size:
                    break
        groups = []
        for ticket, episodes in taken:
            try:
                groups.append(self._group(ticket, episodes))
            except StoreFailed:
                raise
            except UniRLError as error:  # it stays leased, and the others are read
                log.warning("The group of ticket %d cannot be read: %s", ticket, error)
        return groups

    def acknowledge(
        self, consumer: str, groups: Sequence[StoredGroup], update: int
    ) -> list[StoredGroup]:
        """Learned from, at this update. Returns those whose lease held; the others have expired,
        and another consumer may have them.
        """
        held = []
        with self._store.transaction():
            for group in groups:
                number = self._store.run_id(group.run)
                found = self._database.execute(
                    "UPDATE lease SET update_number = ?, until = NULL WHERE run = ? AND ticket = ? "
                    "AND consumer = ? AND update_number IS NULL AND until > ? RETURNING ticket",
                    [update, number, group.ticket, consumer, time.time()],
                )
                if found:
                    held.append(group)
                    self._set(number, group.ticket, ("leased",), "trained", update)
        return held

    def hold(
        self, consumer: str, *, run: str | None = None, seconds: float = 600.0
    ) -> StoredGroup | None:
        """The group that this consumer holds, or else the first free one; None: there is none. One
        that asks again, as its process was killed, gets the same.
        """
        with self._store.transaction():
            held = self._database.execute(
                f"UPDATE lease SET until = ? WHERE {_OF_CONSUMER} RETURNING run, ticket",
                [time.time() + seconds, consumer],
            )
        found = [self.group(*each) for each in held]
        whole = [each for each in found if each is not None]
        return next(iter(whole or self.lease(1, consumer, run=run, seconds=seconds)), None)

    def acknowledge_held(self, updates: Sequence[tuple[str, int]]) -> int:
        """What these consumers hold was learned from: (consumer, update). Returns how many groups;
        a consumer whose lease is another's has none.
        """
        total = 0
        with self._store.transaction():
            for consumer, update in updates:
                rows = self._database.execute(
                    f"UPDATE lease SET update_number = ?, until = NULL WHERE {_OF_CONSUMER} "
                    "RETURNING run, ticket",
                    [update, consumer],
                )
                for number, ticket in rows:
                    self._set(number, ticket, ("leased",), "trained", update)
                total += len(rows)
        return total

    def hold_again(self, begin: str, update: int, *, seconds: float = 600.0) -> int:
        """Consumers whose names begin so were resumed from this update: they hold what later ones
        had learned from. Returns how many groups.
        """
        with self._store.transaction():
            rows = self._database.execute(
                "UPDATE lease SET update_number = NULL, until = ? "
                "WHERE substr(consumer, 1, ?) = ? AND update_number > ? RETURNING run, ticket",
                [time.time() + seconds, len(begin), begin, update],
            )
            for number, ticket in rows:
                self._set(number, ticket, ("trained",), "leased", None)
        return len(rows)

    def count_for(self, begin: str, run: str | None = None) -> int:
        """Whole groups that are free, or that consumers whose names begin so hold or have learned
        from.
        """
        with self._store.transaction():
            self._free("until < ? AND substr(consumer, 1, ?) <> ?",
                       [time.time(), len(begin), begin])  # fmt: skip
            own = self._database.execute(
                "SELECT COUNT(*) FROM lease WHERE substr(consumer, 1, ?) = ?", [len(begin), begin]
            )
            return int(own[0][0]) + len(self._candidates(2**31, run))

    def release(self, consumer: str) -> int:
        """Give back what a consumer holds; how many groups."""
        with self._store.transaction():
            return self._free("consumer = ?", [consumer])

    def groups(self, run: str | None = None) -> Iterator[StoredGroup]:
        """Every whole group that has its tokens, learned from or not, by run and ticket: for
        reading again and again, whatever the ledger says.
        """
        for number, ticket in self.tickets(run):
            group = self.group(number, ticket)
            if group is not None:
                yield group

    def tickets(self, run: str | None = None) -> list[tuple[int, int]]:
        """What `group` takes, of every whole group that has its tokens, by run and ticket."""
        rows = self._candidates(2**31, run, "('done', 'leased', 'trained')")
        return [(number, ticket) for number, ticket in rows]

    def group(self, run: int, ticket: int) -> StoredGroup | None:
        """None: it is not whole any more."""
        with self._store.lock:
            rows = self._database.execute(
                "SELECT id, group_size FROM episode WHERE run = ? AND ticket = ? AND state IN "
                "('done', 'leased', 'trained') AND body_size IS NOT NULL ORDER BY place",
                [run, ticket],
            )
            if not rows or len(rows) < rows[0][1]:
                return None
            try:
                return self._group(ticket, [row[0] for row in rows])
            except UniRLError:
                return None  # it has just expired

    def _group(self, ticket: int, episodes: Iterable[int]) -> StoredGroup:
        records = tuple(self._store.get(ep) for ep in episodes)
        return StoredGroup(records[0].run, ticket, records)

    def _candidates(self, size: int, run: str | None, states: str = "('done')") -> list[Any]:
        of_run = "AND run = (SELECT id FROM run WHERE name = ?)" if run is not None else ""
        with self._store.lock:
            return self._database.execute(
                f"SELECT run, ticket FROM episode WHERE state IN {states} AND ticket > {NO_TICKET} "
                f"AND body_size IS NOT NULL {of_run} GROUP BY run, ticket "
                "HAVING COUNT(*) >= MAX(group_size) ORDER BY run, ticket LIMIT ?",
                [*([run] if run is not None else []), size],
            )

    def _free(self, condition: str, values: list[Any]) -> int:
        rows = self._database.execute(
            f"DELETE FROM lease WHERE {condition} AND update_number IS NULL RETURNING run, ticket",
            values,
        )
        for number, ticket in rows:
            self._set(number, ticket, ("leased",), "done", None)
        return len(rows)

    def _set(
        self, run: int, ticket: int, before: Sequence[str], after: str, update: int | None
    ) -> None:
        marks = ", ".join("?" * len(before))
        self._database.execute(
            "UPDATE episode SET state = ?, trained_version = ? WHERE run = ? AND ticket = ? "
            f"AND state IN ({marks})",
            [after, update, run, ticket, *before],
        )
