"""The server: routes of the page's API, over HTTP on this machine, until Ctrl-C.

Handlers are plain functions, which Starlette calls in threads; what they read is kept by the parts
that they ask.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unirl.errors import UniRLError
from unirl.llm.packages import needs
from unirl.supervision.process_settings import share_freed_memory
from unirl.view.access import Access, App
from unirl.view.answers import answer, error
from unirl.view.details import VIDEOS
from unirl.view.folders import NotThere
from unirl.view.page import ASSETS, saved_page
from unirl.view.questions import bounded, words
from unirl.view.view import MAX_RUNS, View

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)
_NUM_THREADS = 6
"""Questions that are answered at a time: more would wait for each other, and need more memory."""
_FRESH = {"cache-control": "no-cache"}


def make_app(view: View, token: str, port: int) -> App:
    """The ASGI application."""
    with needs("starlette", "the view has no server", "view"):
        from starlette.applications import Starlette
        from starlette.responses import FileResponse, StreamingResponse
        from starlette.responses import Response as Plain
        from starlette.routing import Route

    async def live(request: Request) -> Response:
        def stream() -> Response:
            ids = words(request.query_params, "runs")
            for id in bounded(ids, "runs", MAX_RUNS) if ids else ():
                view.folders.run(id)
            return StreamingResponse(
                view.live.watch(ids),
                media_type="text/event-stream",
                headers={"cache-control": "no-store"},
            )

        return explained(stream)

    def asset(name: str) -> Response:
        if name not in (path.name for path in ASSETS.iterdir()):
            raise NotThere("there is no such file", "index.html names those of the page", "")
        return FileResponse(ASSETS / name, headers=_FRESH)

    def download(text: str, name: str, kind: str) -> Response:
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Plain(text, media_type=kind, headers=headers)

    def export(request: Request) -> Response:
        of = request.path_params
        made = view.export(of["id"], of["episode"], request.query_params)
        return download(made.text, made.name, "application/json")

    def video(id: str, name: str) -> Response:
        path = view.video(id, name)
        return FileResponse(path, media_type=VIDEOS[path.suffix.lower()], headers=_FRESH)

    def page(request: Request) -> Response:
        return download(saved_page(view, request.query_params), "unirl.html", "text/html")

    def get(path: str, make: Callable[[Request], Any]) -> Route:
        def handle(request: Request) -> Response:
            return explained(lambda: make(request))

        return Route(path, handle, methods=["GET"])

    def of_run(path: str, make: Callable[..., Any], *names: str) -> Route:
        def made(request: Request) -> Any:
            return make(*(request.path_params[name] for name in ("id", *names)))

        return get(f"/api/runs/{{id}}{path}", made)

    episode = "/episodes/{episode}"
    routes = [
        get("/", lambda request: asset("index.html")),
        get("/assets/{name}", lambda request: asset(request.path_params["name"])),
        get("/api/runs", lambda request: view.runs()),
        get("/api/series", lambda request: view.series(request.query_params)),
        get("/api/compare", lambda request: view.compare(request.query_params)),
        get("/api/sweeps", lambda request: view.sweeps.all()),
        get("/api/sweeps/{id}", lambda request: view.sweeps.one(request.path_params["id"])),
        get("/api/page", page),
        Route("/api/live", live, methods=["GET"]),
        of_run("", view.run),
        of_run("/names", view.names),
        of_run("/events", view.events),
        of_run("/staleness", view.staleness),
        get(
            "/api/runs/{id}/episodes",
            lambda request: view.find_episodes(request.path_params["id"], request.query_params),
        ),
        of_run(episode, lambda id, name: view.episodes(id).open(name), "episode"),
        get(f"/api/runs/{{id}}{episode}/export", export),
        of_run("/groups/{ticket}", lambda id, ticket: view.episodes(id).group(ticket), "ticket"),
        of_run("/videos/{name}", video, "name"),
    ]

    async def no_route(request: Request, reason: Exception) -> Response:
        return error(("there is no such page", "pages are / and /api/...", "open /"), 404)

    app = Starlette(routes=routes, exception_handlers={404: no_route, 405: no_route})
    app.router.redirect_slashes = False
    return Access(app, token, port)


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


def serve(view: View, listening: socket.socket, token: str, ready: Callable[[], None]) -> None:
    """Blocks until the process is to end. ready: called when it answers."""
    share_freed_memory()
    with needs("uvicorn", "the view has no server", "view"):
        import anyio.to_thread
        import uvicorn
    config = uvicorn.Config(
        make_app(view, token, listening.getsockname()[1]),
        log_level="warning",
        access_log=False,  # its lines would have the token
        lifespan="off",
        timeout_graceful_shutdown=1,  # pages that watch never end by themselves
    )
    # Nor is it an error that they are ended then.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "graceful shutdown exceeded" not in record.getMessage()
    )

    async def run() -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = _NUM_THREADS
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listening]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready()
        await task

    asyncio.run(run())
