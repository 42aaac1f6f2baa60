"""Episodes put into a database and read back: whole, by turn, or by what is known of them.

    store = open_store(StoreConfig(), run_dir)
    ep = store.put(Record(episode, run="calculator", ticket=7, place=0, group_size=8))
    store.turn(ep, 3)                       # reads the bytes of this turn alone
    store.find(Filter(task="calculator", ending="time"))

An episode is written in one transaction: it is there as a whole, once, or not at all.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.outcome import Score
from unirl.llm.trajectories import frames
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.databases.bucket import Bucket, key_part
from unirl.llm.trajectories.databases.database import Database, Row, body_dropped
from unirl.llm.trajectories.databases.schema import EPISODE, VERSION, other_version
from unirl.llm.trajectories.filter import EVERY, Filter
from unirl.llm.trajectories.record import LOST, NO_TICKET, STEP, Record
from unirl.llm.trajectories.redaction import Redaction

_INSERT = (
    f"INSERT INTO episode (run, {', '.join(EPISODE)}, hash, body_key, body_size) "
    f"VALUES ({', '.join('?' * (len(EPISODE) + 4))}) "
    "ON CONFLICT (run, ticket, place, hash) DO NOTHING RETURNING id"
)
_INSERT_STEP = (
    f"INSERT INTO step (ep, {', '.join(STEP)}) VALUES ({', '.join('?' * (len(STEP) + 1))})"
)
_PLAIN = tuple(
    each.name
    for each in fields(Record)
    if each.name not in ("run", "scores") and each.name in EPISODE
)
"""Fields of a record that are columns under the same name."""


@dataclass
class _Entry:
    """Of a transaction: what is to be written when its episodes are in."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    bodies: list[tuple[int, bytes]] = field(default_factory=list)
    ticket: tuple[int, int] | None = None
    """Run and ticket that the rest is of: groups come as a whole."""
    others: list[Row] = field(default_factory=list)
    """What is there of it: place, id, state, hash."""
    lease: list[Row] = field(default_factory=list)


class TrajectoryStore:
    """Safe to use from several threads, one call at a time."""

    def __init__(
        self, database: Database, bucket: Bucket | None = None, *, redact: bool = True
    ) -> None:
        self.database, self.bucket = database, bucket
        self.lock = threading.RLock()
        self.redaction = Redaction() if redact else None
        self.num_duplicates = self.num_late = self.bytes_read = self.bytes_written = 0
        self.is_swept = False
        """Whether bodies that dead processes left in the bucket were looked for."""
        self.name = ""
        """Begins the keys of its bodies: several stores may share a bucket."""
        self._runs: dict[str, int] = {}
        self._clean_texts: set[str] = set()

    def put(self, record: Record) -> int | None:
        """Its number; None: this very episode was there already."""
        return self.put_many([record])[0]

    def put_many(self, records: Sequence[Record], *, bodies: bool = True) -> list[int | None]:
        """All of them, or none where it raises. bodies: False writes their rows alone."""
        with self.lock:
            made = [self._prepared(record, bodies) for record in records]
            with self.transaction():
                entry = _Entry()
                found = [self._insert(entry, record, *parts) for record, parts in made]
                self._complete(entry)
                return found

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """The database's, under the lock. Runs that it entered are forgotten if it fails."""
        with self.lock:
            try:
                with self.database.transaction():
                    yield
            except BaseException:
                self._runs.clear()
                raise

    def _prepared(
        self, record: Record, bodies: bool
    ) -> tuple[Record, tuple[bytes, bytes, str | None]]:
        """Hash, body and the body's key; what takes time is done before the transaction."""
        if record.state == "open":
            return record, (b"", b"", None)
        if not bodies:
            return record, (record.digest(), b"", None)
        body, digest = record.body(self.redaction or str)
        key = None
        if self.bucket is not None:
            day = time.strftime("%Y-%m-%d", time.gmtime(record.created))
            run, task = (key_part(each) for each in (record.run, record.task))
            key = f"{self.name}/{run}/{day}/{task}/{digest.hex()}.utj"
            self.bucket.put(key, body)
        return record, (digest, body, key)

    def _insert(
        self, entry: _Entry, record: Record, digest: bytes, body: bytes, key: str | None
    ) -> int | None:
        run, clean = self.run_id(record.run), self._clean
        row = record.row()
        if record.ticket != NO_TICKET:
            state = self._make_way(entry, run, record, digest)
            if state is None:
                self.num_duplicates += 1
                return None
            row.update(state)
        values = [clean(v) if type(v := row[name]) is str else v for name in EPISODE]
        size = len(body) or None
        found = self.database.execute(_INSERT, [run, *values, digest, key, size])
        if not found:
            self.num_duplicates += 1
            return None
        ep = int(found[0][0])
        if record.ticket != NO_TICKET:
            entry.others.append((record.place, ep, row["state"], digest))
        entry.steps += [
            (ep, *(clean(v) if type(v) is str else v for v in step)) for step in record.steps()
        ]
        if body and key is None:
            entry.bodies.append((ep, body))
        self.bytes_written += len(body)
        return ep

    def _complete(self, entry: _Entry) -> None:
        """Write what belongs to the episodes that were inserted: one statement for all of it."""
        if entry.steps:
            self.database.many(_INSERT_STEP, entry.steps)
        if entry.bodies:
            self.database.many("INSERT INTO body (ep, data) VALUES (?, ?)", entry.bodies)
        entry.steps, entry.bodies = [], []

    def _clean(self, value: str) -> str:
        """What a column takes: no keys, no half characters, no zeros."""
        if value in self._clean_texts:
            return value
        text = self.redaction(value) if self.redaction is not None else value
        text = text.encode("utf-8", "replace").decode().replace("\0", "")
        if text == value and len(text) < 100 and len(self._clean_texts) < 1000:
            self._clean_texts.add(text)  # names and scores come again with each episode
        return text

    def _make_way(
        self, entry: _Entry, run: int, record: Record, digest: bytes
    ) -> dict[str, Any] | None:
        """What the ledger says of this one's state; None: it is there. An attempt at the same
        ticket that a crash has made void expires, if nothing was learned from it.
        """
        if entry.ticket != (run, record.ticket):
            entry.ticket = (run, record.ticket)
            self.database.lock_tickets(run, [record.ticket])
            entry.others = self.database.execute(
                "SELECT place, id, state, hash FROM episode WHERE run = ? AND ticket = ?",
                entry.ticket,
            )
            entry.lease = self.database.execute(
                "SELECT update_number FROM lease WHERE run = ? AND ticket = ?", entry.ticket
            )
        others = [row[1:] for row in entry.others if row[0] == record.place]
        if others:
            self._complete(entry)  # what is dropped may be of this transaction
            entry.ticket = None  # and is to be looked for again
        if any(bytes(found) == digest != b"" for _, _, found in others):
            return None
        self.drop([ep for ep, state, _ in others if state == "open"], whole=True)
        if record.state == "open":
            return {} if not others else None
        is_used = any(state in ("leased", "trained") for _, state, _ in others)
        if is_used:
            self.num_late += 1
            return {"state": "expired"}
        self.drop([ep for ep, state, _ in others if state == "done"])
        if not entry.lease or record.state != "done" or record.episode.ending in LOST:
            return {}
        number = entry.lease[0][0]
        return {"state": "leased" if number is None else "trained", "trained_version": number}

    def drop(self, episodes: Sequence[int], *, whole: bool = False) -> None:
        """Bodies and steps of these, and their rows too if whole. To be called in a transaction."""
        if not episodes:
            return
        marks = ", ".join("?" * len(episodes))
        if self.bucket is not None:
            found = self.database.execute(
                f"SELECT body_key FROM episode WHERE id IN ({marks}) AND body_key IS NOT NULL",
                episodes,
            )
            self.bucket.delete([row[0] for row in found])
        self.database.execute(f"DELETE FROM body WHERE ep IN ({marks})", episodes)
        self.database.execute(f"DELETE FROM step WHERE ep IN ({marks})", episodes)
        if whole:
            self.database.execute(f"DELETE FROM episode WHERE id IN ({marks})", episodes)
        else:
            self.database.execute(
                "UPDATE episode SET state = 'expired', body_key = NULL, body_size = NULL "
                f"WHERE id IN ({marks})",
                episodes,
            )

    def run_id(self, name: str) -> int:
        """The number of a run, which is entered if it is new. To be called in a transaction."""
        if name not in self._runs:
            sql = "SELECT id FROM run WHERE name = ?"
            found = self.database.execute(sql, [name])
            if not found:
                found = self.database.execute(
                    "INSERT INTO run (name, started) VALUES (?, ?) "
                    "ON CONFLICT (name) DO NOTHING RETURNING id",
                    [name, time.time()],
                ) or self.database.execute(sql, [name])
            self._runs[name] = int(found[0][0])
        return self._runs[name]

    def find(self, which: Filter = EVERY, *, limit: int = 100) -> list[dict[str, Any]]:
        """Lines of the index, newest first."""
        where, values = which.where()
        columns = ("id", *EPISODE, "body_size")
        with self.lock:
            rows = self.database.execute(
                f"SELECT (SELECT name FROM run WHERE id = episode.run), {', '.join(columns)} "
                f"FROM episode WHERE {where} ORDER BY created DESC, id DESC LIMIT ?",
                [*values, limit],
            )
        return [dict(zip(("run", *columns), row, strict=True)) for row in rows]

    def count(self, which: Filter = EVERY) -> int:
        where, values = which.where()
        with self.lock:
            return int(
                self.database.execute(f"SELECT COUNT(*) FROM episode WHERE {where}", values)[0][0]
            )

    def steps(self, ep: int) -> list[dict[str, Any]]:
        """Lines of the index for the turns of an episode."""
        with self.lock:
            rows = self.database.execute(
                f"SELECT {', '.join(STEP)} FROM step WHERE ep = ? ORDER BY idx", [ep]
            )
        return [dict(zip(STEP, row, strict=True)) for row in rows]

    def get(self, ep: int) -> Record:
        """The whole episode. Raises UniRLError where there is none, or its body is not kept."""
        with self.lock:
            row = self._row(ep)
            with self._reading(ep) as read:
                body = read(0, 2**31 - 1)
        if not body:
            raise body_dropped(ep, row["state"])
        try:
            episode, prompt = frames.decode(body)
        except (frames.TornBody, ValueError) as error:
            raise _unreadable(ep, error) from error
        return _record(row, episode, prompt)

    def turn(self, ep: int, index: int) -> Turn:
        """One turn, by reading its bytes and where they are."""
        with self.lock:
            try:
                with self._reading(ep) as read:
                    return frames.read_turn(read, index)
            except frames.TornBody as error:
                row = self._row(ep, "state", "body_size")
                if row["body_size"] is None:
                    raise body_dropped(ep, row["state"]) from error
                raise _unreadable(ep, error) from error
            except IndexError as error:
                raise UniRLError(
                    f"episode {ep} has no turn {index}", str(error), "try --step 0"
                ) from error

    def _row(self, ep: int, *columns: str) -> dict[str, Any]:
        names = columns or ("body_size", "body_key", *EPISODE)
        found = self.database.execute(
            f"SELECT (SELECT name FROM run WHERE id = episode.run), {', '.join(names)} "
            "FROM episode WHERE id = ?",
            [ep],
        )
        if not found:
            raise UniRLError(
                f"there is no episode {ep}",
                "an episode is named by its number in the first column of the table",
                "unirl trajectories RUN shows it",
            )
        return dict(zip(("run", *names), found[0], strict=True))

    @contextlib.contextmanager
    def _reading(self, ep: int) -> Iterator[frames.Reader]:
        key, whole = None, 0
        if self.bucket is not None:
            found = self.database.execute(
                "SELECT body_key, body_size FROM episode WHERE id = ?", [ep]
            )
            key, whole = found[0] if found else (None, 0)
        with self.database.reading(ep) as read_own:

            def read(begin: int, size: int) -> bytes:
                if key is not None and self.bucket is not None:
                    data = self.bucket.read(key, begin, min(size, whole - begin))
                else:
                    data = read_own(begin, size)
                self.bytes_read += len(data)
                return data

            yield read

    def close(self) -> None:
        with self.lock:
            self.database.close()


def open_store(config: StoreConfig, folder: Path, *, create: bool = True) -> TrajectoryStore:
    """The store of a run. Raises UniRLError where it cannot be used. create: False opens what is
    there.
    """
    from unirl.llm.trajectories.databases.postgres import PostgresDatabase
    from unirl.llm.trajectories.databases.sqlite import SqliteDatabase

    url = config.database
    bucket = Bucket(config.bodies_url) if config.bodies_url else None
    if url.startswith("postgres"):
        database: Database = PostgresDatabase(url, create=create)
    else:
        path = Path(url.removeprefix("sqlite://")) if url else folder / FILE
        database = SqliteDatabase(path, create=create)
    store = TrajectoryStore(database, bucket, redact=config.redact)
    with store.lock, database.transaction():
        for name, value in (("schema", str(VERSION)), ("name", secrets.token_hex(8))):
            database.execute(
                "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
                [name, value],
            )
        rows = database.execute("SELECT name, value FROM meta")
        known = {str(name): str(value) for name, value in rows}
    found, store.name = known["schema"], known["name"]
    if found != str(VERSION):
        store.close()
        raise other_version(found)
    return store


def _record(row: Mapping[str, Any], episode: Episode, prompt: Sequence[int]) -> Record:
    scores = {name: Score(*values) for name, values in json.loads(row["scores"]).items()}
    plain = {name: row[name] for name in _PLAIN if name != "reward"}
    record = Record(episode, row["run"], prompt=tuple(prompt), scores=scores, **plain)
    if record.total != row["reward"]:
        record = Record(
            episode, row["run"], prompt=tuple(prompt), scores=scores, reward=row["reward"], **plain
        )
    return record


def _unreadable(ep: int, error: Exception) -> UniRLError:
    return UniRLError(f"episode {ep} cannot be read", f"{error}", "look at another one")


def each_id(store: TrajectoryStore, which: Filter) -> Iterator[int]:
    """Numbers of episodes with bodies, oldest first, read in pieces."""
    where, values = which.where()
    last = -1
    while True:
        with store.lock:
            rows = store.database.execute(
                f"SELECT id FROM episode WHERE {where} AND body_size IS NOT NULL AND id > ? "
                "ORDER BY id LIMIT 500",
                [*values, last],
            )
        if not rows:
            return
        yield from (int(row[0]) for row in rows)
        last = int(rows[-1][0])
