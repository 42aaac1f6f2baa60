"""A store in one file: SQLite with a write-ahead log. Several processes of one machine may write.

What was committed survives the death of any process (kill -9): the log is in the file system's
memory by then. It is flushed to the disk at checkpoints, so a machine that loses its power may lose
the last seconds, and never tears an episode.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unirl.errors import UniRLError
from unirl.llm.trajectories.databases.database import SECONDS, Row, StoreFailed
from unirl.llm.trajectories.databases.schema import statements

_TYPES = {"id": "INTEGER PRIMARY KEY", "int": "INTEGER", "real": "REAL", "blob": "BLOB",
          "in_order": " WITHOUT ROWID"}  # fmt: skip
_LOG_PAGES = 4000
"""Of the log before it is merged into the file, with a flush of the disk."""
_LOG_BYTES = 64 << 20
_FREE_PAGES = 2000
"""Given back at a time: each moves pages under the lock of all writers."""


class SqliteDatabase:
    skip_locked = ""

    def __init__(self, path: Path, *, create: bool = True, read_only: bool = False) -> None:
        """read_only: nothing is written beside it, either; the file must be there."""
        self._path, self._read_only = path, read_only
        create = create and not read_only
        try:
            if create:
                # Nobody else reads it, from its first byte on; SQLite's own files take its mode.
                # Only a new one: closing a file that is open gives up the locks that other
                # connections of this process hold on it, and another process then takes the log
                # away from under them.
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            elif not path.is_file():
                raise FileNotFoundError(2, "No such file or directory", str(path))
            self._open()
            if create:
                self._make_tables()
        except (OSError, sqlite3.Error) as error:
            raise UniRLError(
                f"trajectories cannot be kept in {path}",
                f"the system says: {getattr(error, 'strerror', None) or error}",
                "free space or change permissions of its folder, or --no-store.enabled",
            ) from error

    def _open(self) -> None:
        target = str(self._path)
        if self._read_only:
            # Without a writer there is no log, and SQLite would make one, even to read.
            is_quiet = not self._path.with_name(f"{self._path.name}-wal").exists()
            mode = "mode=ro&immutable=1" if is_quiet else "mode=ro"
            target = f"file:{quote(os.fsencode(self._path.absolute()))}?{mode}"
        self._connection = sqlite3.connect(
            target,
            timeout=SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=self._read_only,
        )

    def _make_tables(self) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                for pragma in (
                    "auto_vacuum = INCREMENTAL",
                    "journal_mode = WAL",
                    "synchronous = NORMAL",
                    f"wal_autocheckpoint = {_LOG_PAGES}",
                    f"journal_size_limit = {_LOG_BYTES}",
                ):
                    self._connection.execute(f"PRAGMA {pragma}").fetchall()
                self._connection.execute("BEGIN IMMEDIATE")
                for statement in statements(_TYPES):
                    self._connection.execute(statement)
                self._connection.execute("COMMIT")
                return
            except sqlite3.OperationalError as error:
                # SQLite does not wait for the lock where two processes turn a new file into WAL.
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                time.sleep(0.01)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        try:
            self._connection.executemany(sql, rows)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                self._connection.execute("ROLLBACK")
            raise

    def lock_tickets(self, run: int, tickets: Iterable[int]) -> None:
        """There is one writer at a time."""

    @contextlib.contextmanager
    def reading(self, ep: int) -> Iterator[Callable[[int, int], bytes]]:
        try:
            blob = self._connection.blobopen("body", "data", ep, readonly=True)
        except sqlite3.Error as error:
            if "no such rowid" not in str(error):
                raise self._failed(error) from error
            yield lambda begin, size: b""
            return
        whole = len(blob)

        def read(begin: int, size: int) -> bytes:
            try:
                blob.seek(min(begin, whole))
                return blob.read(max(0, min(size, whole - begin)))
            except sqlite3.Error as error:
                raise self._failed(error) from error

        with blob:
            yield read

    def wait_for_disk(self) -> None:
        self.execute("PRAGMA synchronous = FULL")

    def shrink(self) -> None:
        self.execute(f"PRAGMA incremental_vacuum({_FREE_PAGES})")

    def close(self) -> None:
        self._connection.close()

    def _failed(self, error: sqlite3.Error) -> StoreFailed:
        return StoreFailed(
            f"the trajectories in {self._path} could not be written or read",
            f"SQLite says: {error}",
            "free space; look for a process that holds the file",
        )
