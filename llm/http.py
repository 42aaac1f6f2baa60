"""The one HTTP client of the language package: how engines, teachers and judges behind a url are
asked. `ask` and `events` are one attempt, `again` makes several of it, up to the end of the answer;
`get_json` and `post_json` do both, and explain in three parts what went wrong.

Source: httpx2, which does the work; the WHATWG's server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from unirl.errors import UniRLError
from unirl.llm.packages import needs

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

PAUSES = (0.1, 0.3, 1.0, 2.0)
"""Seconds before each further attempt, where the server does not ask for more."""
MAX_PAUSE = 30.0
"""Seconds: most that a server may ask for where its client has no deadline."""
_REASON_BYTES = 4096
"""How much is read of the reason that a server gives for an error."""


class HttpFailed(Exception):
    """No usable answer. status: 0 where none came; retry_after: seconds, if the server named any.
    attempts: how many failed.
    """

    def __init__(self, why: str, status: int = 0, retry_after: float = 0.0) -> None:
        self.status, self.retry_after, self.attempts = status, retry_after, 1
        super().__init__(why)

    @property
    def may_pass(self) -> bool:
        """Whether it may pass by itself: the connection broke, or the server is busy or ill."""
        return self.status in (0, 408, 429) or (self.status >= 500 and self.status != 501)


class NotConnected(HttpFailed):
    """The connection was not accepted: the request has not arrived."""


class BadStatus(HttpFailed):
    def __init__(self, status: int, body: bytes, retry_after: float = 0.0) -> None:
        self.body = " ".join(body.decode(errors="replace").split())[:400]
        super().__init__(f"status {status}: {self.body}", status, retry_after)


class Nonsense(HttpFailed):
    """What came is no JSON. Where it begins like JSON it was cut off, which may pass."""

    def __init__(self, data: bytes) -> None:
        was_cut = data.lstrip()[:1] in (b"{", b"[")
        super().__init__(f"JSON was expected, {data[:80]!r} came", 0 if was_cut else 200)


def require_url(url: str, setting: str, key_setting: str) -> None:
    """Raise UniRLError unless paths can be appended to a url, and everybody may read it.

    setting, key_setting: where it and the key's environment variable are named.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half an address
        is_address = None
    # What stands before an @ may be a password: nothing of such a url is shown.
    shown = "not shown here, it has an @" if "@" in url else f'"{url}"'
    if not is_address:
        raise UniRLError(
            f"{setting} is {shown}",
            "it must begin with http:// or https:// and name a host",
            "http://127.0.0.1:8000/v1 is where vLLM's server listens by itself",
        )
    if "@" in parts.netloc:
        raise UniRLError(
            f"{setting} names a user or a password",
            "urls are printed, logged and kept in config.toml, so they must hold no secret",
            f"put the key into an environment variable, and its name into {key_setting}",
        )
    if parts.query or parts.fragment:
        raise UniRLError(
            f"{setting} has a ? or a #",
            "paths are appended to it",
            f"end it with /v1; a key belongs into an environment variable, see {key_setting}",
        )


def bearer(variable: str, setting: str) -> dict[str, str]:
    """The header with the key that an environment variable holds; "": none.

    Raises UniRLError, which names the setting, where the variable is empty.
    """
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise UniRLError(
            f"{setting} is {variable}",
            f"environment variable {variable} is empty or not set",
            f"export {variable}=..., or leave {setting} out",
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


class HttpClient:
    """One server, asked from any event loop. Proxies are not used, redirects not followed.

    url: to which paths are appended; see require_url. headers: of every request. seconds: in which
    an answer must begin, and then each piece of it follow; None: the caller sets the deadline.
    pauses: before each further attempt. section: of the config, which errors name: where url and
    timeout_seconds are set. failure: what is raised, from three parts, where no usable answer came.

    Raises UniRLError where httpx2 is missing, and for a header that cannot be sent.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        seconds: float | None = None,
        pauses: Sequence[float] = PAUSES,
        section: str = "engine",
        failure: Callable[[str, str, str], Exception] = UniRLError,
    ) -> None:
        with needs("httpx2", f"{url} cannot be asked"):
            import httpx2  # noqa: F401
        for name, value in headers.items():
            # httpx2 refuses it too, but late, and it shows the value, which may be a key.
            if value != value.strip() or not value.isprintable():
                raise UniRLError(
                    f"{name} for {url} cannot be sent",
                    "a header has no line breaks, and no spaces around it",
                    "look at where it comes from: for a key, the environment variable",
                )
        self.url, self._headers, self._seconds = url.rstrip("/"), dict(headers), seconds
        self._pauses, self._section, self._failure = pauses, section, failure
        self.num_retries = 0
        """Requests that were repeated."""
        # Made once, and only where it is needed: reading the machine's certificates takes longer
        # than a request. The other one trusts no server.
        secure = urlsplit(url).scheme == "https"
        self._tls = (
            ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )

    def root(self) -> HttpClient:
        """The same server without /v1: where its own endpoints are."""
        other = copy.copy(self)
        other.url = self.url.removesuffix("/v1")
        return other

    async def get_json(self, path: str, *, patience: float = 0.0) -> Any:
        """The answer's JSON. patience: seconds to wait for a server that is not there yet."""
        return await self._json_of("GET", path, None, patience=patience)

    async def post_json(
        self, path: str, body: Any = None, *, patience: float = 0.0, once: bool = False
    ) -> Any:
        """The answer's JSON; None where there is no body. patience: seconds to wait for a server
        that went away or is busy. once: it changes the server, so what may have arrived is not
        repeated.
        """
        return await self._json_of("POST", path, body, patience=patience, once=once)

    @contextlib.asynccontextmanager
    async def events(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The chunks of a stream; leaving it cuts the connection, which ends the request. One
        attempt: raises as `ask` does, and HttpFailed where a chunk is broken.
        """
        async with aclosing(await self.ask("POST", path, body, headers)) as answer:
            yield _chunks(answer)

    async def again(
        self, ask: Callable[[], Awaitable[T]], *, patience: float = 0.0, once: bool = False
    ) -> T:
        """What `ask` returns once it succeeds; raises HttpFailed as it does when all pauses and the
        patience (seconds) are used up. once: repeated only where the request has not arrived.
        """
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + patience, 0
        while True:
            try:
                return await ask()
            except HttpFailed as error:
                failure = error
            attempt += 1
            failure.attempts = attempt
            again = isinstance(failure, NotConnected) or (not once and failure.may_pass)
            if not again or (attempt > len(self._pauses) and loop.time() >= end):
                raise failure
            # A server that is busy names a pause, which counts as far as the deadline allows.
            asked = min(failure.retry_after, self._seconds or MAX_PAUSE)
            self.num_retries += 1
            await asyncio.sleep(max(self._pauses[min(attempt, len(self._pauses)) - 1], asked))

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """An answer that has begun with a good status (2xx); the caller closes it. body: as JSON,
        but bytes as they are.

        Raises BadStatus for other statuses, TimeoutError, NotConnected, and HttpFailed for all
        other failures.
        """
        import httpx2

        sent = {
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "Content-Type": "application/json",
            **self._headers,
            **(headers or {}),
        }
        # A client for each request. One for all would belong to one event loop and would have to
        # be closed, and there is nothing to share: closing a connection is how a request is ended.
        client = httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=self._seconds)
        try:
            # httpx2 has a deadline for each wait; here is one for all up to the end of the header.
            async with asyncio.timeout(self._seconds):
                with _as_http_failed(self.url):
                    request = client.build_request(
                        method,
                        self.url + path,
                        content=_content(body),
                        headers={name.encode(): value.encode() for name, value in sent.items()},
                    )
                    response = await client.send(request, stream=True)
                answer = Answer(client, response)
                if not response.is_success:
                    reason = await answer.whole(_REASON_BYTES, cut=True)
                    raise BadStatus(response.status_code, reason, _retry_after(response))
        except BaseException:
            await client.aclose()
            raise
        return answer

    async def _json_of(self, method: str, path: str, body: Any, **how: Any) -> Any:
        async def attempt() -> Any:
            async with aclosing(await self.ask(method, path, body)) as answer:
                data = await answer.whole()
            return _parsed(data) if data.strip() else None

        with self.explained(path):
            return await self.again(attempt, **how)

    @contextlib.contextmanager
    def explained(self, path: str) -> Iterator[None]:
        """What may go wrong with a request or its answer, in three parts. A bad status is left to
        those who know what they asked for.
        """
        try:
            yield
        except BadStatus:
            raise
        except HttpFailed as error:
            count = error.attempts
            rule = f"{count} attempts failed, the last one: {error}" if count > 1 else str(error)
            if isinstance(error, Nonsense):
                raise self._failure(
                    f"{self.url} answers nonsense",
                    rule,
                    f"look whether {self._section}.url leads to an OpenAI-compatible server, "
                    "/v1 included",
                ) from error
            if isinstance(error, NotConnected):
                remedy = f"start the server, or correct {self._section}.url"
                raise self._failure(f"{self.url} cannot be reached", rule, remedy) from error
            raise self._failure(f"{self.url} hung up", rule, "look at the server's log") from error
        except TimeoutError as error:
            raise self._failure(
                f"{self.url} is silent",
                f"{path}: {self._section}.timeout_seconds allows {self._seconds:g} s for the "
                "beginning of an answer and each piece of it",
                "look at the server, or raise the limit",
            ) from error


class Answer:
    """One answer, read piece by piece: by one of its methods, once."""

    def __init__(self, client: httpx2.AsyncClient, response: httpx2.Response) -> None:
        self._client, self._response = client, response

    @property
    def headers(self) -> Mapping[str, str]:
        """Found in any case of their letters."""
        return self._response.headers

    def header_list(self, name: str) -> list[str]:
        """Each line of a header that may come several times, as cookies do."""
        return self._response.headers.get_list(name)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises TimeoutError, and HttpFailed when it breaks off."""
        with _as_http_failed(str(self._response.url)):
            async for piece in self._response.aiter_raw():
                yield piece

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines, each as soon as it is whole.

        Only \\n ends one: httpx2's own lines would also end inside JSON, at U+2028.
        """
        held = b""
        async for piece in self.pieces():
            *whole, held = (held + piece).split(b"\n")
            for line in whole:
                yield line
        if held:
            yield held

    async def whole(self, max_bytes: int | None = None, *, cut: bool = False) -> bytes:
        """All of the body. One longer than max_bytes is cut there, or raises HttpFailed."""
        content = bytearray()
        async for piece in self.pieces():
            content += piece
            if max_bytes is not None and len(content) > max_bytes:
                if cut:
                    break
                raise HttpFailed(f"its answer is too long: at most {max_bytes} bytes are read")
        return bytes(content)

    async def aclose(self) -> None:
        await self._client.aclose()


async def _chunks(answer: Answer) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.lines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk = _parsed(data)
        if not isinstance(chunk, dict):
            raise Nonsense(data)
        if (error := chunk.get("error")) is not None:
            code = error.get("code") if isinstance(error, dict) else None
            raise BadStatus(code if isinstance(code, int) else 500, json.dumps(error).encode())
        yield chunk


def _content(body: Any) -> bytes:
    return body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise Nonsense(data) from None


@contextlib.contextmanager
def _as_http_failed(url: str) -> Iterator[None]:
    """Turn httpx2's exceptions into TimeoutError and HttpFailed."""
    import httpx2

    where = urlsplit(url).netloc
    try:
        yield
    except httpx2.TimeoutException as error:
        raise TimeoutError(f"{where} is silent") from error
    except httpx2.ConnectError as error:
        raise NotConnected(f"no connection to {where}: {_cause(error)}") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise HttpFailed(f"{where} broke off: {_cause(error)}") from error


def _cause(error: BaseException) -> BaseException:
    """What the system said first: the layers above say less ("All connection attempts failed")."""
    first, below = error, error.__cause__ or error.__context__
    while below is not None:
        first = below if isinstance(below, OSError) else first
        below = below.__cause__ or below.__context__
    return first


def _retry_after(response: httpx2.Response) -> float:
    with contextlib.suppress(ValueError):
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    return 0.0  # a date, which we do not follow
