"""Stores that are looked at: nothing is written to them, nor beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unirl.config.secrets import is_redacted
from unirl.errors import UniRLError
from unirl.llm.trajectories.config import FILE, StoreConfig, known_part
from unirl.llm.trajectories.databases.bucket import Bucket
from unirl.llm.trajectories.databases.database import SECONDS, Database
from unirl.llm.trajectories.databases.postgres import PostgresDatabase
from unirl.llm.trajectories.databases.schema import VERSION, other_version
from unirl.llm.trajectories.databases.sqlite import SqliteDatabase
from unirl.llm.trajectories.store import TrajectoryStore


def check_url(url: str) -> None:
    """Raises UniRLError where a flag holds the URL of a database itself: every user of the machine
    sees the flags of a process.
    """
    if url and not url.startswith("env:"):
        raise UniRLError(
            f"--store-url is {url.partition('://')[0]}://...",
            "--store-url is env:NAME, the variable that holds the URL, as that may have a password",
            "export STORE=postgresql://..., and give --store-url env:STORE",
        )


def settings_to_read(table: Mapping[str, Any], url: str = "") -> StoreConfig:
    """Where the episodes of a run are, by its config.toml. url: stands for one that is not stored
    there. Raises UniRLError where it is not known.
    """
    found = known_part(table)
    if not is_redacted(found.url):
        return found
    if not url:
        raise UniRLError(
            "the database of this run's episodes is not known",
            "its URL may hold a password, so config.toml does not keep it",
            "give it again: --store-url env:NAME, with the URL in the variable NAME",
        )
    return replace(found, url=url)


def open_to_read(config: StoreConfig, folder: Path, *, seconds: float = SECONDS) -> TrajectoryStore:
    """The store of a run; its bucket is not asked for anything before a body is read. seconds: for
    a connection; an answer may take three times as long. Raises UniRLError where it cannot be read.
    """
    url = config.database
    if url.startswith("postgres"):
        database: Database = PostgresDatabase(url, read_only=True, seconds=seconds)
    else:
        path = Path(url.removeprefix("sqlite://")) if url else folder / FILE
        database = SqliteDatabase(path, read_only=True)
    try:
        bucket = Bucket(config.bodies_url, seconds, check=False) if config.bodies_url else None
        known = database.execute("SELECT value FROM meta WHERE name = 'schema'")
        if not known or known[0][0] != str(VERSION):
            raise other_version(known[0][0] if known else "?")
    except BaseException:
        database.close()
        raise
    return TrajectoryStore(database, bucket, redact=False)


def find_run(store: TrajectoryStore, config: StoreConfig, folder: Path) -> int | None:
    """The number of this folder's run in a store that several share; None: it has written nothing
    there. A folder that was renamed or copied is known by the run's id.
    """
    name, end = config.run_name(folder), f"-{config.run_id}"
    with store.lock:
        rows = store.database.execute("SELECT id, name FROM run ORDER BY id")
    exact = [id for id, each in rows if each == name]
    renamed = [id for id, each in rows if config.run_id and each.endswith(end)]
    return next(iter([*exact, *renamed]), None)
