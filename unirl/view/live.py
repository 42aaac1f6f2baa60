"""Rows and events as they are written, for all who watch: one look at the files for everybody, and
none where nobody watches.

A client has a bounded queue. One that does not read it loses what is in it and is sent `lost`: it
then asks for everything again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.run_events import NAME as EVENTS
from unirl.view.answers import as_json
from unirl.view.columns import NAME as METRICS
from unirl.view.files import Tail
from unirl.view.folders import Run

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
_LIST_LOOKS = 4
"""Looks at what is watched for one at all runs."""
_MAX_WAITING = 256
_ALIVE_SECONDS = 15.0
Message = tuple[str, Mapping[str, Any]]


@dataclass(eq=False)
class Client:
    watched: frozenset[str]
    queue: asyncio.Queue[Message] = field(default_factory=lambda: asyncio.Queue(_MAX_WAITING))

    def put(self, message: Message) -> None:
        if self.queue.full():
            while not self.queue.empty():
                self.queue.get_nowait()
            message = ("lost", {})
        self.queue.put_nowait(message)


class Live:
    """To be used from one event loop. rows: the list of runs. run: one of them by its id. owner:
    of a run that is a part of another one.
    """

    def __init__(
        self,
        rows: Callable[[], Sequence[Mapping[str, Any]]],
        run: Callable[[str], Run],
        owner: Callable[[Run], Run],
    ) -> None:
        self._rows, self._run, self._owner = rows, run, owner
        self._clients: set[Client] = set()
        self._tails: dict[str, tuple[Tail, Tail]] = {}
        self._lock = threading.Lock()
        self._list: dict[str, Mapping[str, Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self._looks = 0

    async def watch(self, runs: Sequence[str]) -> AsyncIterator[bytes]:
        """Server-sent events, without end: rows and events of these runs, states of all. First
        `watching`: what is written from now on will be sent.
        """
        client = Client(frozenset(runs))
        # Before its runs are followed: a look meanwhile must not forget them again.
        self._clients.add(client)
        try:
            await asyncio.to_thread(self.begin, client.watched)
            if self._task is None:
                self._task = asyncio.create_task(self._look_again())
            yield b"event: watching\ndata: {}\n\n"
            while True:
                try:
                    kind, value = await asyncio.wait_for(client.queue.get(), _ALIVE_SECONDS)
                    yield f"event: {kind}\ndata: {as_json(value)}\n\n".encode()
                except TimeoutError:
                    yield b": alive\n\n"  # without it a connection that is gone is not noticed
        finally:
            self._clients.discard(client)
            if not self._clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            watched = frozenset[str]().union(*(client.watched for client in self._clients))
            try:
                found = await asyncio.to_thread(self.news, watched)
            except Exception:  # what one run has done to its folder must not end it for all
                log.exception("runs could not be looked at")
                continue
            for run, message in found:
                for client in self._clients:
                    if run is None or run in client.watched:
                        client.put(message)

    def begin(self, watched: frozenset[str]) -> None:
        """Follow these runs from where their files end now. Blocks."""
        with self._lock:
            self._follow(watched)
            if self._task is None:
                self._list = {row["id"]: row for row in self._rows()}

    def _follow(self, watched: frozenset[str]) -> None:
        for id in watched - self._tails.keys():
            run = self._run(id)
            self._tails[id] = (
                Tail(run.path, METRICS, from_end=True),
                Tail(self._owner(run).path, EVENTS, from_end=True),
            )

    def news(self, watched: frozenset[str]) -> list[tuple[str | None, Message]]:
        """What has happened since the last call: messages, with the run that one must watch to get
        it; None: for everybody. Blocks.
        """
        with self._lock:
            found: list[tuple[str | None, Message]] = []
            for id in self._tails.keys() - watched:
                del self._tails[id]
            for id in watched & self._tails.keys():
                metrics, events = self._tails[id]
                for kind, tail in (("row", metrics), ("event", events)):
                    rows, begins_again = tail.rows()
                    if begins_again and kind == "row":
                        # Rows that the page has were cut off: it asks for all of them.
                        found.append((id, ("lost", {"run": id})))
                    else:
                        found += [(id, (kind, {"run": id, kind: row})) for row in rows]
            self._looks += 1
            if self._looks % _LIST_LOOKS == 0:
                found += self._changes()
            return found

    def _changes(self) -> list[tuple[str | None, Message]]:
        now = {row["id"]: row for row in self._rows()}
        before, self._list = self._list, now
        found: list[tuple[str | None, Message]] = []
        if now.keys() != before.keys():
            found.append((None, ("runs", {"number": len(now)})))
        found += [
            (None, ("state", {"run": id, **row}))
            for id, row in now.items()
            if id in before and row is not before[id] and row != before[id]
        ]
        return found
