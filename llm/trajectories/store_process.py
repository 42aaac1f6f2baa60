"""A store in a process of its own, so that what it costs is not the time of the process that draws:
neither the interpreter's lock nor, as it is nicer, a core that the run needs.

One request is in flight at a time, and the answer says that it is written. When the writing process
dies it is started again and the request repeated: an episode that was there is not stored twice.
When the process that asks dies, what was sent is still written.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import multiprocessing as mp
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.databases.database import SECONDS, StoreFailed
from unirl.llm.trajectories.expiry import expire
from unirl.llm.trajectories.packed_records import pack, unpack
from unirl.llm.trajectories.record import Record
from unirl.llm.trajectories.store import TrajectoryStore, open_store

NICENESS = 10
"""A tenth of a core where all are busy, and all of one that is idle."""
_ANSWER_SECONDS = 6 * SECONDS
"""Longer than a database may take; then the process is ended."""


class StoreProcess:
    """Started where it is made, by a fork: before the process has threads that may hold locks. One
    thread at a time asks. Raises UniRLError where the store cannot be used.
    """

    def __init__(self, config: StoreConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._pid = 0
        self._counts: Mapping[str, float] = {}
        self._earlier: Counter[str] = Counter()
        """Of processes that have died."""
        self._start()

    def put_many(self, records: Sequence[Record], *, bodies: bool = True) -> list[int | None]:
        """See TrajectoryStore."""
        packed = pack(records)
        found: list[int | None] = self._ask("put", packed, bodies)
        return found

    def expire(self, version: int | None) -> dict[str, int]:
        """See expiry.expire."""
        found: dict[str, int] = self._ask("expire", version)
        return found

    def counts(self) -> dict[str, float]:
        """See TrajectoryStore."""
        return dict(self._earlier + Counter(self._counts))

    def close(self) -> None:
        self._end(SECONDS)

    def _ask(self, *request: Any) -> Any:
        for is_last in (False, True):
            try:
                if not self._pid:
                    self._start()
                self._connection.send_bytes(marshal.dumps(request))
                return self._answer()
            except (EOFError, OSError) as error:
                self._end(0.0)
                if is_last:
                    raise StoreFailed(
                        "the process that writes the trajectories died twice",
                        f"its connection says: {error or 'it was closed'}",
                        "see the log of the system, for memory above all",
                    ) from error

    def _answer(self) -> Any:
        if not self._connection.poll(_ANSWER_SECONDS):
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
        kind, found, self._counts = marshal.loads(self._connection.recv_bytes())
        if kind == "failed":
            name, parts = found
            raise (StoreFailed if name == "StoreFailed" else UniRLError)(*parts)
        return found

    def _start(self) -> None:
        own, other = mp.Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _close_all_but(other.fileno())
                _serve(other, self._config, self._folder)
            finally:
                os._exit(0)
        other.close()
        self._earlier.update(self._counts)
        self._counts = {}
        self._pid, self._connection = pid, own
        try:
            self._answer()
        except BaseException:
            self._end(0.0)
            raise

    def _end(self, seconds: float) -> None:
        """Let it write what it has for so long; idempotent."""
        if not self._pid:
            return
        self._connection.close()
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    break
                time.sleep(0.005)
        self._pid = 0


def _close_all_but(kept: int) -> None:
    """What the other process has open is not held open here, when it has died."""
    for each in os.listdir("/proc/self/fd") if sys.platform == "linux" else range(3, 1024):
        if int(each) > 2 and int(each) != kept:
            with contextlib.suppress(OSError):
                os.close(int(each))


def _serve(connection: Connection, config: StoreConfig, folder: Path) -> None:
    """The process: answer until the other end is closed."""
    gc.freeze()  # looking at what was inherited would copy it
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # it ends with the process that asks
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    store: TrajectoryStore | None = None

    def answer(do: Callable[..., Any], *values: Any) -> None:
        try:
            kind, found = "done", do(*values)
        except UniRLError as error:
            kind, found = "failed", (type(error).__name__, tuple(error.parts))
        except Exception as error:  # the other side says it
            parts = ("trajectories could not be written", f"{type(error).__name__}: {error}", "")
            kind, found = "failed", ("StoreFailed", parts)
        counts = {} if store is None else store.counts()
        connection.send_bytes(marshal.dumps((kind, found, counts)))

    def open_it() -> None:
        nonlocal store
        store = open_store(config, folder)

    def put(packed: bytes, bodies: bool) -> list[int | None]:
        assert store is not None
        return store.put_many(unpack(packed), bodies=bodies)

    def sweep(version: int | None) -> dict[str, int]:
        assert store is not None
        return expire(store, config, version=version)

    calls: dict[str, Callable[..., Any]] = {"put": put, "expire": sweep}
    with contextlib.suppress(EOFError, OSError):
        answer(open_it)
        while store is not None:
            name, *values = marshal.loads(connection.recv_bytes())
            answer(calls[name], *values)
    if store is not None:
        store.close()
