"""The table of a queue's places: which is in which state, whose it is and since when; source: none.

Words of 64 bits, in the memory of one process or of several. A word is written whole or not at all,
so a process killed between two stores leaves a state that reads as "before" or "after": of a
place's words, the state is always stored last.
"""

from __future__ import annotations

import time

FREE, RUNNING, READY, TAKEN, DUE = range(5)
STATE_NAMES = ("free", "running", "ready", "taken", "due")
"""due: nobody holds the place, but its ticket is still to be done: see `reissue`."""
REASONS = (
    "stale",
    "actor_died",
    "actor_failed",
    "timeout",
    "filtered",
    "zero_variance",
    "aborted",
    "shutdown",
)
"""Why a slot was discarded. A recipe may declare more."""

CLOSED, NEXT_TICKET, VERSION, LEARNED, BACKLOG, _HEADER = range(6)
"""Words of the whole table; after them marks of those who wait, what each actor committed, and
discards by reason. BACKLOG: how many restored tickets have found no place yet."""
STATE, TICKET, ACTOR, START_VERSION, FIRST, LAST, WAIT_US, WORK_US, START_US, _ROW = range(10)
"""Words of a place, from its row on."""


def table_words(num_slots: int, num_actors: int, num_reasons: int) -> int:
    """How many int64 words the table of such a queue has."""
    return _HEADER + (num_actors + 1) + num_actors + num_reasons + num_slots * _ROW


class SlotTable:
    """What can be read off the table without a lock; each word is of its own moment.

    words: `table_words(...)` int64 words, zeroed by the creator.
    """

    def __init__(
        self, words: memoryview, num_slots: int, num_actors: int, reasons: tuple[str, ...]
    ) -> None:
        self._words, self._reasons = words, reasons
        self._waiting = _HEADER
        """Where the mark of who listens to bell 0 stands."""
        self._committed = self._waiting + num_actors + 1
        """Where the number of slots that actor 0 committed stands."""
        self._discarded = self._committed + num_actors
        first_row = self._discarded + len(reasons)
        self._rows = [first_row + i * _ROW for i in range(num_slots)]
        # One word of every place, read in one go: views of the table, not copies.
        places = words[first_row : first_row + num_slots * _ROW]
        self._states, self._tickets = places[STATE::_ROW], places[TICKET::_ROW]

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return bool(self._words[CLOSED])

    @property
    def next_ticket(self) -> int:
        """The ticket that the next acquired slot gets, unless another is due."""
        return int(self._words[NEXT_TICKET])

    @property
    def num_free(self) -> int:
        """Places that nobody holds."""
        counts = self.counts()
        return counts["free"] + counts["due"]

    def counts(self) -> dict[str, int]:
        """How many places are in each state of STATE_NAMES."""
        states = self._states.tolist()
        return {name: states.count(state) for state, name in enumerate(STATE_NAMES)}

    def discarded(self) -> dict[str, int]:
        """How many slots were discarded since the queue was made, by reason."""
        return {
            reason: int(self._words[self._discarded + i]) for i, reason in enumerate(self._reasons)
        }

    def totals(self) -> dict[str, int]:
        """Slots started, committed and learned since the queue was made."""
        return {
            "started": int(self._words[NEXT_TICKET]),
            "committed": sum(self._words[self._committed : self._discarded]),
            "learned": int(self._words[LEARNED]),
        }

    def ages(self, learner_version: int) -> tuple[list[int], list[int]]:
        """Ages in updates of the running slots (since their start) and of the ready ones."""
        words = self._words
        running = [
            learner_version - words[row + START_VERSION]
            for row in self._rows
            if self._held(row, RUNNING)
        ]
        ready = [
            learner_version - words[row + FIRST] for row in self._rows if self._held(row, READY)
        ]
        return running, ready

    def waited_for(self) -> str:
        """One sentence on who holds the places: the end of every deadline's message."""
        words, now = self._words, int(time.monotonic() * 1e6)
        counts = ", ".join(f"{number} {name}" for name, number in self.counts().items() if number)
        running = [
            f"actor {words[row + ACTOR]} has held ticket {words[row + TICKET]} "
            f"for {(now - words[row + START_US]) / 1e6:.0f} s"
            for row in self._rows
            if self._held(row, RUNNING)
        ]
        return f"of {len(self._rows)} places: {counts}" + (
            "; " + ", ".join(running) if running else ""
        )

    def oldest_running(self) -> tuple[int, int, float] | None:
        """The oldest running ticket, the actor that holds it, and for how many seconds."""
        words, now = self._words, int(time.monotonic() * 1e6)
        running = [
            (words[row + TICKET], words[row + ACTOR], now - words[row + START_US])
            for row in self._rows
            if self._held(row, RUNNING)
        ]
        if not running:
            return None
        ticket, actor, held_us = min(running)
        return int(ticket), int(actor), held_us / 1e6

    def _held(self, row: int, state: int) -> bool:
        return bool(self._words[row + STATE] == state)
