"""The server: routes of the page's API, over HTTP on this machine.

Handlers are plain functions, which Starlette calls in threads; what they read is kept by the parts
that they ask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unirl.errors import UniRLError
from unirl.llm.packages import needs
from unirl.view.access import Access, App
from unirl.view.answers import answer, error
from unirl.view.columns import ColumnStore
from unirl.view.details import compared, details, events_of
from unirl.view.folders import Folders, NotThere, Run
from unirl.view.live import Live
from unirl.view.reduce import between, reduced
from unirl.view.staleness import histogram
from unirl.view.summary import Summaries

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)
ASSETS = Path(__file__).parent / "assets"
MAX_RUNS, MAX_NAMES, MAX_POINTS = 64, 200, 5000
"""Of one request for series."""


class View:
    """What the pages are made from."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.folders = Folders(roots)
        self.summaries = Summaries(self.folders)
        self.columns = ColumnStore()
        self.live = Live(self.runs, self.folders.run, self.owner)

    def runs(self) -> list[Mapping[str, Any]]:
        return self.summaries.all()

    def run(self, id: str) -> dict[str, Any]:
        run = self.folders.run(id)
        return details(run, self.owner(run), self.summaries.of(run), has={})

    def owner(self, run: Run) -> Run:
        """The run that it is a part of, or itself."""
        return self.folders.run(run.part_of) if run.part_of else run

    def names(self, id: str) -> list[str]:
        return self.columns.names(self.folders.run(id))

    def events(self, id: str) -> list[dict[str, Any]]:
        return events_of(self.owner(self.folders.run(id)))

    def staleness(self, id: str) -> dict[str, Any]:
        return histogram(self.columns, self.folders.run(id))

    def compare(self, ids: str) -> dict[str, Any]:
        runs = _bounded(self.folders.several(ids), "runs", MAX_RUNS)
        return {"keys": compared([self.summaries.of(run).config for run in runs])}

    def series(self, query: Mapping[str, str]) -> dict[str, Any]:
        runs = _bounded(self.folders.several(query.get("runs", "")), "runs", MAX_RUNS)
        names = _bounded([name for name in query.get("names", "").split(",") if name],
                         "names", MAX_NAMES)  # fmt: skip
        points = int(number(query, "points", 800, 1, MAX_POINTS))
        axis = choice(query, "x", ("step", "seconds"))
        begin, end = (number(query, key) if query.get(key) else None for key in ("from", "to"))
        found = {}
        for run in runs:
            columns = self.columns.get(run, names)
            some = between(columns[axis], begin, end)
            x = columns[axis][some]
            found[run.id] = {
                name: reduced(x, columns[name][some], points)
                for name in names
                if np.isfinite(columns[name][some]).any()
            }
        return found


def _bounded(found: list[Any], name: str, most: int) -> list[Any]:
    if not 1 <= len(found) <= most:
        raise UniRLError(
            f"{name} names {len(found)}",
            f"1 to {most} at a time, with commas between them",
            "ask for them in several requests" if found else f"give {name}=...",
        )
    return found


def number(
    query: Mapping[str, str],
    key: str,
    default: float | None = None,
    least: float = -1e300,
    most: float = 1e300,
) -> float:
    """A number of a query. Raises UniRLError where it is none, or out of its bounds."""
    text = query.get(key) or ("" if default is None else str(default))
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UniRLError(
            f"{key} is {text[:40]!r}", f"it is a number from {least:g} to {most:g}", "leave it out"
        )
    return value


def choice(query: Mapping[str, str], key: str, known: tuple[str, ...]) -> str:
    """One of some words of a query, by default the first."""
    value = query.get(key) or known[0]
    if value not in known:
        raise UniRLError(
            f"{key} is {value[:40]!r}", f"it is one of {', '.join(known)}", f"try {known[0]}"
        )
    return value


def make_app(view: View, token: str, port: int) -> App:
    """The ASGI application."""
    with needs("starlette", "the view has no server", "view"):
        from starlette.applications import Starlette
        from starlette.responses import FileResponse, StreamingResponse
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles

    def index(request: Request) -> Response:
        return FileResponse(ASSETS / "index.html", headers={"cache-control": "no-cache"})

    async def live(request: Request) -> Response:
        ids = [id for id in request.query_params.get("runs", "").split(",") if id]

        def stream() -> Response:
            for id in _bounded(ids, "runs", MAX_RUNS) if ids else ():
                view.folders.run(id)
            return StreamingResponse(
                view.live.watch(ids),
                media_type="text/event-stream",
                headers={"cache-control": "no-store"},
            )

        return explained(stream)

    def get(path: str, make: Callable[[Request], Any]) -> Route:
        def handle(request: Request) -> Response:
            return explained(lambda: make(request))

        return Route(path, handle, methods=["GET"])

    def of_run(make: Callable[[str], Any]) -> Callable[[Request], Any]:
        return lambda request: make(request.path_params["id"])

    routes = [
        Route("/", index, methods=["GET"]),
        get("/api/runs", lambda request: view.runs()),
        get("/api/runs/{id}", of_run(view.run)),
        get("/api/runs/{id}/names", of_run(view.names)),
        get("/api/runs/{id}/events", of_run(view.events)),
        get("/api/runs/{id}/staleness", of_run(view.staleness)),
        Route("/api/live", live, methods=["GET"]),
        get("/api/series", lambda request: view.series(request.query_params)),
        get("/api/compare", lambda request: view.compare(request.query_params.get("runs", ""))),
        Mount("/assets", StaticFiles(directory=ASSETS)),
    ]
    unknown = error(("there is no such page", "pages are / and /api/...", "open /"), 404)

    async def no_route(request: Request, reason: Exception) -> Response:
        return unknown

    return Access(
        Starlette(routes=routes, exception_handlers={404: no_route, 405: no_route}), token, port
    )


def explained(make: Callable[[], Any]) -> Response:
    """An answer, or what is wrong with the question."""
    from starlette.responses import Response

    try:
        found = make()
        return found if isinstance(found, Response) else answer(found)
    except NotThere as reason:
        return error(reason.parts, 404)
    except UniRLError as reason:
        return error(reason.parts, 400)
    except Exception as reason:
        log.exception("a page could not be made")
        what = f"unexpected {type(reason).__name__}: {reason}"[:500]
        return error((what, "the page asked for what the server cannot read", ""), 500)
