"""The endpoint: sessions behind the APIs that clients of language models speak.

It lives in a thread with a loop of its own, as an engine may compute on the loop of its actor; a
chat runs on the loop of its session. Which session a request belongs to is said by a secret, in the
bearer key or in the URL; a client that is given the URL alone needs nothing else. What a client can
cause is answered with a status 4xx and a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from unirl.errors import Restartable, UniRLError
from unirl.llm.agents.answer import Answer, EpisodeEnded
from unirl.llm.agents.session import Session
from unirl.llm.endpoint import chat, messages, responses
from unirl.llm.endpoint.body import read_body
from unirl.llm.endpoint.browsers import App, NoBrowsers
from unirl.llm.endpoint.delivery import Delivery, Reader, cut
from unirl.llm.endpoint.dialect import Asked, BadRequest, Dialect, Found, streamed
from unirl.llm.engine import SamplingConfig
from unirl.llm.packages import needs

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 10.0
"""How long an answer is drawn on for a client that has gone away, and may ask again."""
_START_SECONDS = 20.0
_CLOSE_SECONDS = 5.0
_CODES = {"context": "context_length_exceeded", "max_turns": "max_turns"}
_ROUTES: Mapping[str, Dialect] = {
    "chat/completions": chat,
    "responses": responses,
    "messages": messages,
}


class Host(NamedTuple):
    """A session, and the loop that its chats run on."""

    session: Session
    loop: asyncio.AbstractEventLoop

    def do(self, work: Coroutine[Any, Any, T]) -> Future[T | Exception]:
        """On that loop; what it raises is its result, as nobody may be left to ask for that. Raises
        EpisodeEnded where the loop runs no more.
        """
        settled = _settled(work)
        try:
            return asyncio.run_coroutine_threadsafe(settled, self.loop)
        except RuntimeError:
            settled.close()
            work.close()
            raise EpisodeEnded("aborted", "the episode has ended") from None


Find = Callable[[str, str], Host | None]
"""The session of a key and of an X-Session-ID ("": none was sent); None: there is none."""


class Endpoint:
    """Serves sessions until it is closed.

    port: 0: any free one. unix_socket: instead of a port. takes_sampling: temperature and top_p of
    clients are heeded; training draws as the run says. find: where sessions come from besides
    `open`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        unix_socket: Path | None = None,
        takes_sampling: bool = False,
        find: Find | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._host, self._port, self._unix_socket = host, port, unix_socket
        self._takes_sampling, self._find = takes_sampling, find
        self._retry_seconds = retry_seconds
        self._hosts: dict[str, Host] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._left: set[asyncio.Task[None]] = set()
        self._works: set[Future[Answer | Exception]] = set()

    @property
    def root(self) -> str:
        """The URL that paths are appended to."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def url(self, secret: str) -> str:
        """Of a session, as OPENAI_BASE_URL; without /v1 as ANTHROPIC_BASE_URL."""
        return f"{self.root}/s/{secret}/v1"

    def open(self, session: Session, loop: asyncio.AbstractEventLoop | None = None) -> str:
        """Serve a session; its secret, which is also the key of its clients."""
        secret = secrets.token_urlsafe(24)
        self._hosts[secret] = Host(session, loop or asyncio.get_running_loop())
        return secret

    def forget(self, secret: str) -> None:
        """Serve it no more. What is in flight ends when the session is closed."""
        self._hosts.pop(secret, None)

    def start(self) -> None:
        """Returns when it accepts connections."""
        with needs("uvicorn", "the endpoint of agents has no server"):
            import uvicorn
        listening = self._listen()
        settings = uvicorn.Config(
            self._app(),
            lifespan="off",
            log_level="error",  # it warns of each request that is no HTTP
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=60,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="endpoint", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise UniRLError(
                    "the endpoint of agents did not start",
                    f"it has {_START_SECONDS:.0f} s",
                    "the log says more",
                )
            time.sleep(0.01)

    def close(self) -> None:
        """Idempotent. What is in flight is drawn no more, and answered as of an ended episode."""
        self._hosts.clear()
        for work in [*self._works]:
            work.cancel()
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_CLOSE_SECONDS)
            self._server.force_exit = True
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None
        if self._unix_socket is not None:
            self._unix_socket.unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        try:
            if self._unix_socket is not None:
                listening = socket.socket(socket.AF_UNIX)
                listening.bind(str(self._unix_socket))
                self._unix_socket.chmod(0o600)
            else:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                # With its protocol named, asyncio sends small answers at once (TCP_NODELAY).
                listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((self._host, self._port))
                self._port = listening.getsockname()[1]
        except OSError as error:
            where = self._unix_socket or f"{self._host}:{self._port}"
            raise UniRLError(
                f"the endpoint cannot listen on {where}", str(error), "choose another port or host"
            ) from error
        listening.listen(1024)
        return listening

    def _app(self) -> App:
        with needs("starlette", "the endpoint of agents has no server"):
            from starlette.applications import Starlette
            from starlette.routing import Route
        routes = []
        for prefix in ("", "/s/{secret}"):
            for base in ("", "/v1"):
                for path, dialect in _ROUTES.items():
                    handler = self._handler(dialect)
                    routes.append(Route(f"{prefix}{base}/{path}", handler, methods=["POST"]))
                count = self._count_handler()
                path = f"{prefix}{base}/messages/count_tokens"
                routes.append(Route(path, count, methods=["POST"]))
                routes.append(Route(f"{prefix}{base}/models", self._models, methods=["GET"]))
        routes.append(Route("/health", self._models, methods=["GET"]))
        errors: dict[Any, Any] = {404: self._no_route, 405: self._no_route}
        app = Starlette(routes=routes, exception_handlers=errors)
        return NoBrowsers(app, self._host if self._unix_socket is None else None)

    def _handler(self, dialect: Dialect) -> Callable[[Request], Awaitable[Any]]:
        async def handle(request: Request) -> Response | Delivery:
            try:
                host = self._host_of(request)
                asked = dialect.read(await read_body(request.receive))
                return await self._answer(request, dialect, host, asked)
            except asyncio.CancelledError:  # by `close`
                return _explained(dialect, EpisodeEnded("aborted", "the endpoint is closed"))
            except Exception as error:
                return _explained(dialect, error)

        return handle

    def _count_handler(self) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                host = self._host_of(request)
                asked = messages.read(await read_body(request.receive))
                work = host.session.count(asked.messages, asked.tools)
                counted = _result(await asyncio.wrap_future(host.do(work)))
                return _json({"input_tokens": counted})
            except Exception as error:
                return _explained(messages, error)

        return handle

    async def _models(self, request: Request) -> Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "unirl"}
        return _json({"object": "list", "data": [model]})

    async def _no_route(self, request: Request, error: Any) -> Response:
        known = ", ".join(f"POST /v1/{path}" for path in _ROUTES)
        why = f"{request.method} {request.url.path[:200]} is not served; known: {known}"
        return _json(chat.error(why, error.status_code, None), error.status_code)

    def _host_of(self, request: Request) -> Host:
        headers = request.headers
        kind, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        name = headers.get("x-session-id", "")
        for secret in (request.path_params.get("secret"), key, headers.get("x-api-key"), name):
            if secret and secret in self._hosts:
                return self._hosts[secret]
        given = str(request.path_params.get("secret") or key or headers.get("x-api-key") or "")
        if self._find is not None and (host := self._find(given, name)) is not None:
            return host
        raise BadRequest(
            "no session has this key: it belongs in OPENAI_API_KEY, as UNIRL gave it, or the "
            "episode has ended",
            401,
            "invalid_api_key",
        )

    async def _answer(
        self, request: Request, dialect: Dialect, host: Host, asked: Asked
    ) -> Delivery:
        sampling, ignored = self._sampling(host.session, asked)
        is_retry = _is_retry(request.headers.get("x-stainless-retry-count", ""))
        work = host.do(
            host.session.chat(
                asked.messages,
                tools=asked.tools,
                stop=asked.stop,
                max_tokens=asked.max_tokens,
                sampling=sampling,
                is_retry=is_retry,
                is_read=False,
            )
        )
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        reader = Reader(request.receive)
        try:
            answer = await self._awaited(reader, work)
            return _delivery(reader, dialect, host, asked, answer, ignored)
        except BaseException:
            reader.forget()
            raise

    async def _awaited(self, reader: Reader, work: Future[Answer | Exception]) -> Answer:
        """The answer, unless the client leaves: then it is drawn on for a while, as the client may
        come back for it.
        """
        drawn = asyncio.ensure_future(asyncio.wrap_future(work))
        if await reader.awaits(drawn):
            return _result(drawn.result())
        outliving = asyncio.ensure_future(self._outlive(drawn))
        self._left.add(outliving)
        outliving.add_done_callback(self._left.discard)
        raise BadRequest.left()

    async def _outlive(self, drawn: asyncio.Future[Any]) -> None:
        await asyncio.wait({drawn}, timeout=self._retry_seconds)
        drawn.cancel()

    def _sampling(
        self, session: Session, asked: Asked
    ) -> tuple[SamplingConfig | None, tuple[str, ...]]:
        """What a client says of it, and what of that has no effect."""
        given = {"temperature": asked.temperature, "top_p": asked.top_p}
        wanted = {key: value for key, value in given.items() if value is not None}
        if not self._takes_sampling:
            return None, (*wanted, *asked.ignored)
        if wanted.get("top_p") == 0.0:
            wanted["top_p"] = 1e-6
        return session.sampling_with(wanted), asked.ignored


async def _settled(work: Awaitable[T]) -> T | Exception:
    try:
        return await work
    except Exception as error:
        return error


def _result(settled: T | Exception) -> T:
    if isinstance(settled, Exception):
        raise settled
    return settled


def _delivery(
    reader: Reader,
    dialect: Dialect,
    host: Host,
    asked: Asked,
    answer: Answer,
    ignored: Sequence[str],
) -> Delivery:
    session, number = host.session, answer.turn
    turn = session.episode.turns[number]
    found = Found(
        id=f"{session.id}-{number}",
        created=int(time.time()),
        answer=answer,
        num_given=session.num_given(number),
        prompt=session.prompt_tokens(number) if asked.token_ids else (),
        completion=turn.completion,
        text_of=session.text_of,
    )
    headers = {
        "x-unirl-turn": str(number),
        "x-unirl-origin": "replayed" if answer.replayed else turn.origin,
    }
    if ignored:
        headers["x-unirl-ignored"] = ", ".join(ignored)
    if asked.stream:
        headers["content-type"] = "text/event-stream; charset=utf-8"
        pieces = streamed(dialect, asked, found)
    else:
        data = json.dumps(dialect.write(asked, found)).encode()
        headers |= {"content-type": "application/json", "content-length": str(len(data))}
        pieces = cut(data)

    def own() -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody learns from it
            host.loop.call_soon_threadsafe(session.own, number)

    return Delivery(reader, pieces, headers, own)


def _is_retry(count: str) -> bool:
    return count.isdecimal() and int(count[:9]) > 0


def _explained(dialect: Dialect, error: Exception) -> Response:
    code: str | None = None
    why = str(error)
    if isinstance(error, BadRequest):
        status, code = error.status, error.code
    elif isinstance(error, EpisodeEnded):
        status = 410 if error.ending == "aborted" else 400
        code = _CODES.get(error.ending, "episode_ended")
    elif isinstance(error, UniRLError):
        status = 400
    elif isinstance(error, RecursionError):
        status, why = 400, "the body is nested too deep"
    else:
        status = 503 if isinstance(error, Restartable) else 500
        log.error("a request of an agent failed", exc_info=error)
        why = f"the engine cannot answer now ({type(error).__name__})"
    return _json(dialect.error(why, status, code), status)


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(value).encode(), status, media_type="application/json")
