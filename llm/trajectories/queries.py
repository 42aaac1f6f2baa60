"""Questions over many episodes that people ask by name."""

from __future__ import annotations

from typing import Any

from unirl.llm.trajectories.store import TrajectoryStore

_LIVE = "state <> 'open'"
QUERIES: dict[str, tuple[tuple[str, ...], str]] = {
    "endings": (
        ("task", "ending", "episodes", "reward", "turns", "seconds"),
        "SELECT task, ending, COUNT(*), AVG(reward), AVG(turns), AVG(seconds) FROM episode "
        f"WHERE {_LIVE} GROUP BY task, ending ORDER BY task, COUNT(*) DESC",
    ),
    "passes": (
        ("task", "version", "episodes", "passed", "reward"),
        "SELECT task, version_max, COUNT(*), "
        "AVG(CASE WHEN reward > 0 THEN 1.0 ELSE 0.0 END), AVG(reward) FROM episode "
        f"WHERE {_LIVE} AND reward IS NOT NULL GROUP BY task, version_max "
        "ORDER BY task, version_max",
    ),
    "tools": (
        ("tool", "turns", "failed", "drawn", "seconds"),
        "SELECT tool, COUNT(*), SUM(CASE WHEN ok = 0 THEN 1 ELSE 0 END), SUM(drawn), SUM(seconds) "
        "FROM step WHERE tool IS NOT NULL GROUP BY tool ORDER BY COUNT(*) DESC",
    ),
    "forks": (
        ("agent", "origin", "turns"),
        "SELECT agent, origin, COUNT(*) FROM step JOIN episode ON episode.id = step.ep "
        "GROUP BY agent, origin ORDER BY agent, COUNT(*) DESC",
    ),
    "updates": (
        ("update", "tickets", "first", "last"),
        "SELECT update_number, COUNT(*), MIN(ticket), MAX(ticket) FROM lease "
        "WHERE update_number IS NOT NULL GROUP BY update_number ORDER BY update_number",
    ),
}
"""Columns and SQL, by name."""


def answer(store: TrajectoryStore, name: str) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows."""
    columns, sql = QUERIES[name]
    with store.lock:
        return list(columns), [list(row) for row in store.database.execute(sql)]
