"""A store in Postgres, for several machines: psycopg 3."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.trajectories.databases.database import SECONDS, Row, StoreFailed
from unirl.llm.trajectories.databases.schema import statements

_TYPES = {
    "id": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "int": "BIGINT",
    "real": "DOUBLE PRECISION",
    "blob": "BYTEA",
    "in_order": "",
}
_SETUP_LOCK = 0x756E6972
"""Of two processes that make the tables, one waits."""
_AGAIN_SECONDS = 5.0
"""Between attempts to connect again: each may take a connection's whole time limit."""


class PostgresDatabase:
    skip_locked = "FOR UPDATE SKIP LOCKED"

    def __init__(self, url: str, *, create: bool = True) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise UniRLError(
                "trajectories cannot be kept in Postgres",
                f"the package psycopg is not installed ({error})",
                "pip install 'unirl[postgres]'",
            ) from error
        self._psycopg, self._url = psycopg, url
        self._next_attempt = 0.0
        try:
            self._connect()
            if create:
                with self._connection.transaction():
                    self._connection.execute(f"SELECT pg_advisory_xact_lock({_SETUP_LOCK})")
                    # Making what is there would lock tables that others write to.
                    found = self._connection.execute("SELECT to_regclass('body')").fetchone()
                    is_made = found is not None and found[0] is not None
                    for statement in () if is_made else statements(_TYPES):
                        self._connection.execute(statement)
                    if not is_made:
                        # Bodies are compressed already: out of the row as they are, so that a
                        # substring reads its own pages alone.
                        self._connection.execute(
                            "ALTER TABLE body ALTER COLUMN data SET STORAGE EXTERNAL"
                        )
        except psycopg.Error as error:
            raise UniRLError(
                "the database of store.url cannot be used for trajectories",
                f"Postgres says: {_first_line(error)}",
                "check that it runs, and the URL: postgresql://USER@HOST/NAME",
            ) from error

    def _connect(self) -> None:
        self._connection = self._psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=int(SECONDS),
            options=f"-c statement_timeout={int(3000 * SECONDS)}"
            f" -c lock_timeout={int(1000 * SECONDS)} -c client_min_messages=warning",
            keepalives_idle=10,
            tcp_user_timeout=int(3000 * SECONDS),
        )

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._explained():
            cursor = self._connection.execute(_own(sql), values)
            return cursor.fetchall() if cursor.description else []

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._explained(), self._connection.cursor() as cursor:
            cursor.executemany(_own(sql), rows)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with self._explained():
            if self._connection.closed:
                if time.monotonic() < self._next_attempt:
                    raise self._psycopg.OperationalError("the connection is lost")
                self._next_attempt = time.monotonic() + _AGAIN_SECONDS
                self._connect()
            with self._connection.transaction():
                yield

    def lock_tickets(self, run: int, tickets: Iterable[int]) -> None:
        for ticket in sorted(set(tickets)):
            self.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", [f"{run}/{ticket}"]
            )

    @contextlib.contextmanager
    def reading(self, ep: int) -> Iterator[Callable[[int, int], bytes]]:
        def read(begin: int, size: int) -> bytes:
            sql = "SELECT substring(data FROM ?::int FOR ?::int) FROM body WHERE ep = ?"
            found = self.execute(sql, [begin + 1, min(size, 2**31 - 2 - begin), ep])
            return bytes(found[0][0]) if found else b""

        yield read

    def wait_for_disk(self) -> None:
        """As it is, unless its owner says otherwise."""

    def shrink(self) -> None:
        """Postgres does it by itself."""

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._psycopg.Error as error:
            raise StoreFailed(
                "the trajectories in Postgres could not be written or read",
                f"Postgres says: {_first_line(error)}",
                "check that it runs and has space",
            ) from error


def _own(sql: str) -> str:
    return sql.replace("?", "%s")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
