"""Episodes written behind the run: a thread with a bounded queue.

`keep` never waits. Where the queue is full it takes an episode without its tokens and texts; where
the store fails, as on a full disk, episodes are counted and lost, which is said once, and the run
continues: what comes when the store can be written again is stored again. With `store.required`
the next `keep` raises instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from unirl.errors import UniRLError
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.expiry import expire
from unirl.llm.trajectories.record import Record
from unirl.llm.trajectories.store import TrajectoryStore

log = logging.getLogger(__name__)

TOGETHER = 32
"""Episodes of a transaction, where so many wait."""
EXPIRE_SECONDS = 300.0
CLOSE_SECONDS = 10.0


class TrajectoryWriter:
    """Owns its store. A record that `keep` took is there when `flush` has returned True."""

    def __init__(self, store: TrajectoryStore, config: StoreConfig | None = None) -> None:
        self._store, self._config = store, config or StoreConfig()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Record, bool]] = deque()
        self._num_bodies = self._num_taken = 0
        self._is_busy = self._is_closing = False
        self._version: int | None = None
        self._error: Exception | None = None
        """Why the newest could not be written."""
        self._num_lost = self._num_outages = 0
        """Since they could be written."""
        self._next_sweep = time.monotonic() + EXPIRE_SECONDS
        self._counts = {"episodes": 0, "dropped_bodies": 0, "failed": 0, "duplicates": 0}
        self._counts |= {"expired": 0, "redacted": 0}
        self._thread = threading.Thread(target=self._run, name="trajectories", daemon=True)
        self._thread.start()

    def keep(self, records: Iterable[Record]) -> None:
        """These episodes are finished. Raises UniRLError if the store is required, and fails."""
        with self._changed:
            if self._config.required and self._error is not None:
                raise UniRLError(
                    "episodes cannot be stored, and store.required is true",
                    f"{self._error}",
                    "see that the store can be written, then: unirl resume; or set store.required "
                    "to false: the run then continues, and counts what is lost",
                )
            for record in records:
                self._see(record.version_max)
                has_body = self._num_bodies < self._config.max_bodies
                if has_body:
                    self._num_bodies += 1
                else:
                    self._counts["dropped_bodies"] += 1
                    record = record.bare()
                self._waiting.append((record, has_body))
            self._changed.notify_all()

    def failed(self, number: int, error: Exception) -> None:
        """So many episodes could not even be kept."""
        with self._changed:
            self._counts["failed"] += number
        self._say(error)

    def stats(self) -> dict[str, float]:
        """Since the start, by name; `queued` is of now."""
        with self._changed:
            counts = dict(self._counts)
            counts["queued"] = len(self._waiting) + self._is_busy
        counts["duplicates"] = self._store.num_duplicates
        counts["bytes"] = self._store.bytes_written
        if self._store.redaction is not None:
            counts["redacted"] = self._store.redaction.count
        return {name: float(value) for name, value in counts.items()}

    def flush(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until nothing waits to be written; False: it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._is_busy), seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for so long; idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning(
                "%d episodes were not written: the store took longer than %.0f s",
                len(self._waiting),
                seconds,
            )
            return  # the thread has the connection
        self._store.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait = max(0.0, self._next_sweep - time.monotonic())
                self._changed.wait_for(lambda: bool(self._waiting or self._is_closing), wait)
                if self._is_closing and not self._waiting:
                    return
                chunk = [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]
                self._is_busy = bool(chunk)
            self._write(chunk)
            if time.monotonic() >= self._next_sweep:
                self._sweep()
            with self._changed:
                self._num_bodies -= sum(has_body for _, has_body in chunk)
                self._is_busy = False
                self._changed.notify_all()

    def _see(self, version: int | None) -> None:
        """The policy is at least at this version."""
        if version is not None:
            self._version = max(version, self._version or 0)

    def _write(self, chunk: Sequence[tuple[Record, bool]]) -> None:
        for bodies in (True, False):
            records = [record for record, has_body in chunk if has_body is bodies]
            if records and not self._put(records, bodies):
                # One that cannot be written must not take the others with it.
                for record in records:
                    if len(records) == 1 or not self._put([record], bodies):
                        self._counts["failed"] += 1
                        self._num_lost += 1

    def _put(self, records: Sequence[Record], bodies: bool) -> bool:
        try:
            found = self._store.put_many(records, bodies=bodies)
        except Exception as error:  # whatever it is, it must not end the run
            self._say(error)
            return False
        if self._error is not None and not self._config.required:
            log.info("Trajectories are kept again; %d episodes were lost", self._num_lost)
            self._error, self._num_lost = None, 0
        self._counts["episodes"] += sum(ep is not None for ep in found)
        return True

    def _sweep(self) -> None:
        self._next_sweep = time.monotonic() + EXPIRE_SECONDS
        try:
            found = expire(self._store, self._config, version=self._version)
            self._counts["expired"] += sum(found.values())
        except Exception as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        self._num_outages += self._error is None
        is_new, self._error = self._error is None, error
        if is_new and str(self._num_outages).strip("0") == "1":  # the 1st, 10th, 100th ...
            log.warning(
                "Trajectories are not kept: %s The run continues; store/failed counts them.", error
            )
