"""Episodes expire: by age, by how far the policy has moved on, by a change of what they were made
with, by a quota. Their bodies and turns are deleted, their line stays until it is twice as old.

It works in pieces, each a transaction of its own, so that writers wait for milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.store import TrajectoryStore

CHUNK = 500
DAY = 86400.0
_KEPT = "state IN ('done', 'trained', 'failed')"
_FAILED_SOONER = 4
"""Failed episodes are kept for this part of the time."""


def expire(
    store: TrajectoryStore,
    config: StoreConfig,
    *,
    version: int | None = None,
    digests: Mapping[str, str] | None = None,
    now: float | None = None,
) -> dict[str, int]:
    """How many episodes expired, by reason. version: the policy's, for `max_lag`. digests: of a
    task as it is now, under "task:NAME", or of an environment, under "env:NAME": episodes with
    others are of no use any more. Episodes that are leased stay.
    """
    now = time.time() if now is None else now
    age = config.expire_days * DAY
    found: dict[str, int] = {}
    if age:
        found["age"] = _sweep(store, f"{_KEPT} AND created < ?", [now - age])
        soon = [now - age / _FAILED_SOONER]
        found["failed"] = _sweep(store, "state = 'failed' AND created < ?", soon)
        _sweep(store, "state IN ('expired', 'open') AND created < ?", [now - 2 * age], whole=True)
    if config.max_lag and version is not None:
        lag = [version - config.max_lag]
        found["lag"] = _sweep(store, f"{_KEPT} AND version_max < ?", lag)
    for name, digest in (digests or {}).items():
        kind, _, which = name.partition(":")
        column = {"task": "task", "env": "env"}[kind]
        found["changed"] = found.get("changed", 0) + _sweep(
            store,
            f"{_KEPT} AND {column} = ? AND {column}_digest <> ? AND {column}_digest <> ''",
            [which, digest],
        )
    if config.max_per_task:
        found["quota"] = _sweep_quota(store, config.max_per_task)
    _count(store, found)
    if store.bucket is not None and not store.is_swept:
        _sweep_bucket(store)
        store.is_swept = True
    with store.lock:
        store.database.shrink()
    return {reason: number for reason, number in found.items() if number}


def counted(store: TrajectoryStore) -> dict[str, int]:
    """Episodes that have expired since the store was made, by reason."""
    with store.lock:
        rows = store.database.execute("SELECT name, value FROM counter")
    return {name: int(value) for name, value in rows}


def _sweep(store: TrajectoryStore, where: str, values: list[Any], *, whole: bool = False) -> int:
    total = 0
    while True:
        with store.lock, store.database.transaction():
            rows = store.database.execute(
                f"SELECT id FROM episode WHERE {where} LIMIT {CHUNK} {store.database.skip_locked}",
                values,
            )
            store.drop([row[0] for row in rows], whole=whole)
        total += len(rows)
        if len(rows) < CHUNK:
            return total
        with store.lock:
            store.database.shrink()


def _sweep_quota(store: TrajectoryStore, most: int) -> int:
    with store.lock:
        tasks = store.database.execute(
            f"SELECT task FROM episode WHERE {_KEPT} GROUP BY task HAVING COUNT(*) > ?", [most]
        )
    total = 0
    for (task,) in tasks:
        with store.lock:
            edge = store.database.execute(
                f"SELECT created, id FROM episode WHERE {_KEPT} AND task = ? "
                "ORDER BY created DESC, id DESC LIMIT 1 OFFSET ?",
                [task, most],
            )
        if edge:
            where = f"{_KEPT} AND task = ? AND (created, id) <= (?, ?)"
            total += _sweep(store, where, [task, *edge[0]])
    return total


def _count(store: TrajectoryStore, found: Mapping[str, int]) -> None:
    rows = [(reason, number) for reason, number in found.items() if number]
    if rows:
        with store.lock, store.database.transaction():
            store.database.many(
                "INSERT INTO counter (name, value) VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = counter.value + excluded.value",
                rows,
            )


def _sweep_bucket(store: TrajectoryStore) -> None:
    """A process that died between body and row has left the body."""
    assert store.bucket is not None
    for keys in store.bucket.older_than(store.name):
        if keys:
            marks = ", ".join("?" * len(keys))
            with store.lock:
                rows = store.database.execute(
                    f"SELECT body_key FROM episode WHERE body_key IN ({marks})", keys
                )
            store.bucket.delete(sorted(set(keys) - {row[0] for row in rows}))
