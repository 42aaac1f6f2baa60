"""Which episodes a page wants to see, as its query says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unirl.view.questions import choice, number

SORTS = {
    "new": ("id", True), "old": ("id", False),
    **{f"{sign}{name}": (name, bool(sign))
       for name in ("reward", "turns", "tokens", "seconds") for sign in ("", "-")},
}  # fmt: skip
"""Column, and whether the largest is first."""
MAX_ROWS = 500


@dataclass(frozen=True)
class Wanted:
    equal: Mapping[str, str] = field(default_factory=dict)
    """task, task_id, ending, split, state: "" is not here."""
    reward_min: float | None = None
    reward_max: float | None = None
    version_min: float | None = None
    version_max: float | None = None
    """Versions of which one drew some of its tokens."""
    text: str = ""
    """In the task, in what was said, or in why it ended; in any case of letters."""
    sort: str = "new"
    limit: int = 50
    after: int = 0
    """Rows that were shown before."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """Raises UniRLError where the query cannot be understood."""
        bounds = {
            key: number(query, key) if query.get(key) else None
            for key in ("reward_min", "reward_max", "version_min", "version_max")
        }
        equal = {key: query[key] for key in ("task", "task_id", "ending", "split", "state")
                 if query.get(key)}  # fmt: skip
        return cls(
            equal,
            **bounds,
            text=query.get("text", "").strip()[:200],
            sort=choice(query, "sort", tuple(SORTS)),
            limit=int(number(query, "limit", 50, 1, MAX_ROWS)),
            after=int(number(query, "after", 0, 0, 1e12)),
        )
