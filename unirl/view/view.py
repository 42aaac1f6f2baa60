"""What the pages are made from: the answers of the API, as values of JSON."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unirl.view.columns import ColumnStore
from unirl.view.details import compared, details, events_of, videos
from unirl.view.episodes.episodes import FORMATS, Episodes, Export
from unirl.view.episodes.sources import Databases
from unirl.view.episodes.wanted import Wanted
from unirl.view.folders import Folders, NotThere, Run
from unirl.view.live import Live
from unirl.view.questions import bounded, choice, number, words
from unirl.view.series import between, histogram, reduced
from unirl.view.summary import Summaries
from unirl.view.sweeps import Sweeps

MAX_RUNS, MAX_NAMES, MAX_POINTS = 64, 200, 5000
"""Of one request for series."""
_MAX_OPEN = 4
"""Runs whose episodes are kept open: 10 to 20 MB each, of 100 000."""


class View:
    """Safe to use from several threads. store_url: of the database of runs that keep no URL."""

    def __init__(self, roots: Sequence[Path], store_url: str = "") -> None:
        self.folders = Folders(roots)
        self.summaries = Summaries(self.folders)
        self.sweeps = Sweeps(self.folders)
        self.columns = ColumnStore()
        self.live = Live(self.runs, self.folders.run, self.owner)
        self._databases = Databases(store_url)
        self._episodes: dict[str, Episodes] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[Mapping[str, Any]]:
        return self.summaries.all()

    def run(self, id: str) -> dict[str, Any]:
        run = self.folders.run(id)
        found = details(run, self.owner(run), self.summaries.of(run))
        return {**found, "has": {**found["has"], **self.episodes(id).has()}}

    def owner(self, run: Run) -> Run:
        """The run that it is a part of, or itself."""
        return self.folders.run(run.part_of) if run.part_of else run

    def names(self, id: str) -> list[str]:
        return self.columns.names(self.folders.run(id))

    def events(self, id: str) -> list[dict[str, Any]]:
        run = self.folders.run(id)
        return events_of(self.owner(run), self.columns.get(self.owner(run), ()))

    def staleness(self, id: str) -> dict[str, Any]:
        return histogram(self.columns, self.folders.run(id))

    def compare(self, query: Mapping[str, str]) -> dict[str, Any]:
        runs = self._several(query)
        return {"keys": compared([self.summaries.of(run).config for run in runs])}

    def series(self, query: Mapping[str, str]) -> dict[str, Any]:
        runs, names = self._several(query), bounded(words(query, "names"), "names", MAX_NAMES)
        points = int(number(query, "points", 800, 1, MAX_POINTS))
        axis = choice(query, "x", ("step", "seconds"))
        begin, end = (number(query, key) if query.get(key) else None for key in ("from", "to"))
        found = {}
        for run in runs:
            columns = self.columns.get(run, names)
            some = between(columns[axis], begin, end)
            found[run.id] = {
                name: reduced(columns[axis][some], columns[name][some], points)
                for name in names
                if np.isfinite(columns[name][some]).any()
            }
        return found

    def find_episodes(self, id: str, query: Mapping[str, str]) -> dict[str, Any]:
        return self.episodes(id).find(Wanted.of(query))

    def export(self, id: str, episode: str, query: Mapping[str, str]) -> Export:
        return self.episodes(id).export(episode, choice(query, "format", FORMATS))

    def video(self, id: str, name: str) -> Path:
        """The file of a video."""
        run = self.owner(self.folders.run(id))
        if name not in videos(run):
            raise NotThere("there is no such video", "GET /api/runs/ID has their names", "")
        return run.path / "videos" / name

    def episodes(self, id: str) -> Episodes:
        run = self.folders.run(id)
        with self._lock:
            found = self._episodes.pop(id, None)
            if found is None:
                found = Episodes(run, self.summaries.of(run).config, self._databases)
            self._episodes[id] = found  # at the end: the newest
            while len(self._episodes) > _MAX_OPEN:
                del self._episodes[next(iter(self._episodes))]
            return found

    def _several(self, query: Mapping[str, str]) -> list[Run]:
        return [self.folders.run(id) for id in bounded(words(query, "runs"), "runs", MAX_RUNS)]
