"""What a store asks of a database. SQL is written once, with ? for values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from unirl.errors import UniRLError

Row = tuple[Any, ...]
SECONDS = 10.0
"""How long a statement may wait for another process, or for a connection."""


class StoreFailed(UniRLError):
    """The store could not write or read: a full disk, a lost connection, a lock held too long. It
    may do so later.
    """


class BodyDropped(UniRLError):
    """Tokens and texts of an episode were dropped, or have expired."""


def body_dropped(ep: int, why: str) -> BodyDropped:
    return BodyDropped(
        f"episode {ep} has no tokens and texts any more",
        f"they were dropped, or have expired ({why})",
        "its line of the table is all that is left; look at another one",
    )


class Database(Protocol):
    """One connection, for one thread at a time. Raises StoreFailed for what its driver raises."""

    skip_locked: str
    """What makes a SELECT pass over rows that another transaction has."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """The rows that a statement returns."""

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """One statement for each row."""

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing of what is written in its block."""

    def lock_tickets(self, run: int, tickets: Iterable[int]) -> None:
        """Until the transaction ends: an episode that arrives and a mark on its ticket must see
        each other.
        """

    def reading(self, ep: int) -> AbstractContextManager[Callable[[int, int], bytes]]:
        """Reads bytes of a body, (offset, length), and no others. b"" where there is none."""

    def wait_for_disk(self) -> None:
        """From now on what is committed survives a loss of power, too."""

    def shrink(self) -> None:
        """Give space of what was deleted back."""

    def close(self) -> None:
        """Idempotent."""
