"""Which tickets were learned from, at which update, written down beside a run.

A checkpoint says at which update a run continues; the ledger says which tickets later updates had
learned from, so that each is learned from once however often the run is killed:

    ledger.released_after(checkpoint's update)      # before anyone produces
    ledger.trained(tickets, update)                 # after each update
    ledger.flush()                                  # before each checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class TicketLedger(Protocol):
    """Belongs to one learner of one run. What it cannot write it counts, unless it is to end the
    run: then `flush` and `released_after` raise UniRLError.
    """

    num_updates: int | None
    """Updates that there are samples for, from what `released_after` found; None: no end is known.
    """

    def trained(self, tickets: Sequence[int], update: int) -> None:
        """This update has learned from these. Must not wait: it is called between updates."""

    def flush(self) -> None:
        """What was marked is on the disk when this returns; it has a deadline."""

    def released_after(self, update: int) -> None:
        """The run begins at this update: what later ones had learned from is learned from again."""

    def stats(self) -> Mapping[str, float]:
        """Totals since it was made, by the name of their metric."""

    def close(self) -> None:
        """Write what waits, until a deadline; idempotent."""
