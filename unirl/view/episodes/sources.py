"""Where the episodes of a run are read: in the file of its folder, or in a database that several
runs share, whose bodies may be in a bucket.

Run folders may be anybody's. So nothing that a folder says leads to another file or machine: of a
database it only names the variable of the environment that has the URL, and else the URL is the one
that `unirl view` was given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from unirl.config.secrets import redacted
from unirl.errors import UniRLError
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.reading import find_run, open_to_read, settings_to_read
from unirl.llm.trajectories.store import TrajectoryStore
from unirl.view.files import is_inside, signature
from unirl.view.folders import NotThere

_SECONDS = 1.0
"""For a connection to a database; see `open_to_read`. A page waits for it, and may ask again."""
_AGAIN_SECONDS = 5.0
"""After which one that could not be opened is tried again."""


class Source(Protocol):
    """What is read by one thread at a time. Raises UniRLError where it cannot be."""

    @property
    def is_there(self) -> bool:
        """Whether there should be episodes; nobody is asked for that."""

    @property
    def is_written(self) -> bool:
        """Whether a run may be writing what was opened."""

    def open(self) -> tuple[TrajectoryStore, str]:
        """The store, and what is true of this run's rows of `episode`, as SQL. Where either is
        another one than before, what was known of the rows is void.
        """


class FileSource:
    """within: the folder that the file must be in when all links are followed."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        self._path, self._within = path, within
        self._store: TrajectoryStore | None = None
        self._opened: tuple[bool, tuple[int, ...]] = False, ()

    @property
    def is_there(self) -> bool:
        inside = self._within is None or is_inside(self._path, self._within)
        return inside and self._path.is_file()

    @property
    def is_written(self) -> bool:
        return self._opened[0]

    def open(self) -> tuple[TrajectoryStore, str]:
        if not self.is_there:
            name = self._path.name
            raise NotThere("this run has no stored episodes", f"they are in {name}", "")
        has_log = self._path.with_name(f"{self._path.name}-wal").exists()
        # Of a file that nobody writes SQLite looks at nothing twice.
        now = has_log, signature(self._path)[: 2 if has_log else 4]
        if self._store is None or now != self._opened:
            if self._store is not None:
                self._store.close()
                self._store = None
            settings = StoreConfig(url=f"sqlite://{self._path}")
            self._store, self._opened = open_to_read(settings, self._path.parent), now
            self._store.database.execute("PRAGMA cache_size = -16000")
        return self._store, "1 = 1"


class Databases:
    """What runs share: each is opened once, and none is tried all the time that cannot be. url: of
    runs whose config.toml keeps none.
    """

    def __init__(self, url: str = "") -> None:
        self._url = url
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], TrajectoryStore | tuple[float, UniRLError]] = {}

    def source(self, folder: Path, config: Mapping[str, Any]) -> Source:
        """config: the tables of the run's config.toml."""
        table = config.get("store")
        if isinstance(table, Mapping) and table.get("url") and table.get("enabled", True):
            return SharedSource(self, folder, config)
        return FileSource(folder / FILE, within=folder)

    def settings(self, config: Mapping[str, Any]) -> StoreConfig:
        table = config["store"]
        if not str(table["url"]).startswith("env:"):
            table = {**table, "url": redacted("postgresql://")}
        return settings_to_read({"store": table}, self._url)

    def open(self, settings: StoreConfig, folder: Path) -> TrajectoryStore:
        key = settings.database, settings.bodies_url
        with self._lock:
            found = self._known.get(key)
            if isinstance(found, TrajectoryStore):
                return found
            if found is not None and time.monotonic() < found[0]:
                raise UniRLError(*found[1].parts)
            try:
                store = open_to_read(settings, folder, seconds=_SECONDS)
            except UniRLError as error:
                self._known[key] = time.monotonic() + _AGAIN_SECONDS, error
                raise
            self._known[key] = store
            return store


class SharedSource:
    """One run's part of a database."""

    is_there = True
    is_written = True

    def __init__(self, databases: Databases, folder: Path, config: Mapping[str, Any]) -> None:
        self._databases, self._folder, self._config = databases, folder, config
        self._file: FileSource | None = None
        self._found: tuple[TrajectoryStore, int] | None = None

    def open(self) -> tuple[TrajectoryStore, str]:
        settings = self._databases.settings(self._config)
        scheme, _, path = settings.database.partition("://")
        if scheme == "sqlite":  # looked at again, as it may be replaced
            self._file = self._file or FileSource(Path(path))
            store = self._file.open()[0]
        else:
            store = self._databases.open(settings, self._folder)
        if self._found is None or self._found[0] is not store:
            number = find_run(store, settings, self._folder)
            if number is None:
                return store, "1 = 0"  # it has written nothing yet
            self._found = store, number
        return store, f"run = {self._found[1]}"
