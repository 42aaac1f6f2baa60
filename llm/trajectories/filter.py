"""Which episodes are asked for, by what the index knows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Filter:
    """Which episodes; None: any."""

    run: str | None = None
    ticket: int | None = None
    task: str | None = None
    task_id: str | None = None
    split: str | None = None
    state: str | None = None
    ending: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    version: int | None = None
    """One that drew some of its tokens."""

    def where(self) -> tuple[str, list[Any]]:
        conditions, values = ["1 = 1"], []
        for name, sql in (
            ("run", "run = (SELECT id FROM run WHERE name = ?)"),
            ("reward_min", "reward >= ?"),
            ("reward_max", "reward <= ?"),
            ("version", "? BETWEEN version_min AND version_max"),
            *((each, f"{each} = ?") for each in ("ticket", "task", "task_id", "split", "state")),
            # As the partial index has it.
            (
                "ending",
                "ending = ?" if self.ending == "stop" else "ending <> 'stop' AND ending = ?",
            ),
        ):
            value = getattr(self, name)
            if value is not None:
                conditions.append(sql)
                values.append(value)
        return " AND ".join(conditions), values


EVERY = Filter()
"""All episodes."""
