"""A store in Postgres, for several machines: psycopg 3."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
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

    def __init__(
        self, url: str, *, create: bool = True, read_only: bool = False, seconds: float = SECONDS
    ) -> None:
        """seconds: for a connection; a statement may take three times as long. read_only: nothing
        is written, a lost connection is made again, and a server that hangs is given up, too.
        """
        try:
            import psycopg
        except ImportError as error:
            raise UniRLError(
                "trajectories cannot be kept in Postgres",
                f"the package psycopg is not installed ({error})",
                "pip install 'unirl[postgres]'",
            ) from error
        self._psycopg, self._url = psycopg, url
        self._read_only, self._seconds = read_only, seconds
        self._next_attempt = 0.0
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            # What libpq says of it has parts of it, and thereby of its password.
            raise UniRLError(
                "the URL of the database of store.url cannot be read",
                "it is postgresql://USER:PASSWORD@HOST/NAME",
                "write other characters than letters and digits as %40 and the like",
            ) from None
        try:
            self._connect()
            if create and not read_only:
                with self._connection.transaction():
                    self._connection.execute(f"SELECT pg_advisory_xact_lock({_SETUP_LOCK})")
                    # Making what is there would lock tables that others write to.
                    found = self._connection.execute("SELECT to_regclass('episode_run')").fetchone()
                    is_made = found is not None and found[0] is not None
                    for statement in () if is_made else statements(_TYPES):
                        self._connection.execute(statement)
                    if not is_made:
                        # Bodies are compressed already: out of the row as they are, so that a
                        # substring reads its own pages alone.
                        self._connection.execute(
                            "ALTER TABLE body ALTER COLUMN data SET STORAGE EXTERNAL"
                        )
                        # A file has the episodes of one run; here others are between them.
                        self._connection.execute(
                            "CREATE INDEX IF NOT EXISTS episode_run ON episode (run, id)"
                        )
        except psycopg.Error as error:
            raise UniRLError(
                "the database of store.url cannot be used for trajectories",
                f"Postgres says: {_first_line(error)}",
                "check that it runs, and the URL: postgresql://USER@HOST/NAME",
            ) from error

    def _connect(self) -> None:
        seconds, read_only = self._seconds, "on" if self._read_only else "off"
        self._connection = self._psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=int(seconds),
            options=f"-c statement_timeout={int(3000 * seconds)}"
            f" -c lock_timeout={int(1000 * seconds)} -c client_min_messages=warning"
            f" -c default_transaction_read_only={read_only}",
            keepalives_idle=int(seconds),
            keepalives_interval=int(seconds),
            tcp_user_timeout=int(3000 * seconds),
        )

    def _reconnect(self) -> None:
        """Where the connection is lost."""
        if self._connection.closed:
            if time.monotonic() < self._next_attempt:
                raise self._psycopg.OperationalError("the connection is lost")
            self._next_attempt = time.monotonic() + _AGAIN_SECONDS
            self._connect()

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._explained():
            if self._read_only:  # not within a transaction, whose beginning would be lost
                self._reconnect()
                with _in_time(self._connection.fileno(), 3 * self._seconds + 1):
                    return self._connection.execute(_own(sql), values).fetchall()
            cursor = self._connection.execute(_own(sql), values)
            return cursor.fetchall() if cursor.description else []

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._explained(), self._connection.cursor() as cursor:
            cursor.executemany(_own(sql), rows)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with self._explained():
            self._reconnect()
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


@contextlib.contextmanager
def _in_time(connection: int, seconds: float) -> Iterator[None]:
    """Ends the connection after so many seconds: the server looks after its own time limit, unless
    it hangs, or its machine is gone.
    """
    with socket.socket(fileno=os.dup(connection)) as own:

        def end() -> None:
            with contextlib.suppress(OSError):  # it has come to its end meanwhile
                own.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _own(sql: str) -> str:
    return sql.replace("?", "%s")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
