"""HTTP as the language wing speaks it: where a server is and with which key it is asked, a request,
and an answer that is read piece by piece and can be cut at any moment. Source: httpx2, which does
the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from unirl.errors import UniRLError

if TYPE_CHECKING:
    import httpx2

_REASON_BYTES = 4096
"""How much is read of what a server says about an error."""


class HttpFailed(Exception):
    """No usable answer. status: 0 where none came; retry_after: seconds, if the server said so."""

    def __init__(self, why: str, status: int = 0, retry_after: float = 0.0) -> None:
        self.status, self.retry_after = status, retry_after
        super().__init__(why)


class NotConnected(HttpFailed):
    """Nobody took the connection: the request has not arrived."""


class BadStatus(HttpFailed):
    """The server answered with an error. body: its beginning."""

    def __init__(self, status: int, body: str, retry_after: float = 0.0) -> None:
        self.body = " ".join(body.split())[:400]
        super().__init__(f"status {status}: {self.body}", status, retry_after)


def require_url(url: str, setting: str, key_setting: str) -> None:
    """Raise UniRLError unless paths can be appended to a url, and everybody may read it.

    setting, key_setting: where it and the key's environment variable are named.
    """
    try:
        parts = urlsplit(url)
        leads = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half an address
        leads = None
    # What stands before an @ may be a password: nothing of such a url is shown.
    shown = "not shown here, it has an @" if "@" in url else f'"{url}"'
    if not leads:
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


class Http:
    """One server, asked from any event loop. Proxies are not used, redirects not followed.

    url: to which paths are appended. headers: of every request. seconds: in which an answer must
    begin, and then each piece of it follow; None: the caller sets the deadline.

    Raises UniRLError where httpx2 is missing, and for a header that cannot be sent.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], *, seconds: float | None = None
    ) -> None:
        try:
            import httpx2  # noqa: F401
        except ImportError as error:
            raise UniRLError(
                "httpx2 is not installed",
                "servers behind a url are asked through it",
                "pip install 'unirl[llm]'",
            ) from error
        for name, value in headers.items():
            # httpx2 refuses it too, but late, and it shows the value, which may be a key.
            if value != value.strip() or not value.isprintable():
                raise UniRLError(
                    f"{name} for {url} cannot be sent",
                    "a header has no line breaks, and no spaces around it",
                    "look at where it comes from: for a key, the environment variable",
                )
        self.url, self._headers, self._seconds = url.rstrip("/"), dict(headers), seconds
        # Made once, and only where it is needed: reading the machine's certificates takes longer
        # than a request. The other one trusts nobody.
        secure = urlsplit(url).scheme == "https"
        self._tls = (
            ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )

    def at(self, url: str) -> Http:
        """The same server and settings under another of its urls."""
        other = copy.copy(self)
        other.url = url
        return other

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """An answer that has begun with a good status (2xx); the caller closes it. body: as JSON.

        Raises BadStatus for other statuses, TimeoutError, NotConnected, and HttpFailed for whatever
        else fails.
        """
        import httpx2

        told = {
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "Content-Type": "application/json",
            **self._headers,
            **(headers or {}),
        }
        # A client for each request. One for all would belong to one event loop and need somebody to
        # close it, and there is nothing to share: closing a connection is how a request is ended.
        client = httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=self._seconds)
        try:
            # httpx2 has a deadline for each wait; here is one for all up to the end of the header.
            async with asyncio.timeout(self._seconds):
                with _told_plainly(self.url):
                    request = client.build_request(
                        method,
                        self.url + path,
                        content=b"" if body is None else json.dumps(body).encode(),
                        headers={name.encode(): value.encode() for name, value in told.items()},
                    )
                    response = await client.send(request, stream=True)
                answer = Answer(client, response)
                if not response.is_success:
                    reason = await answer.beginning(_REASON_BYTES)
                    raise BadStatus(response.status_code, reason, _retry_after(response))
        except BaseException:
            await client.aclose()
            raise
        return answer


class Answer:
    """One answer, read piece by piece: by one of its methods, once."""

    def __init__(self, client: httpx2.AsyncClient, response: httpx2.Response) -> None:
        self._client, self._response = client, response

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises TimeoutError, and HttpFailed when it breaks off."""
        with _told_plainly(str(self._response.url)):
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

    async def whole(self, max_bytes: int | None = None) -> bytes:
        """All of the body. Raises HttpFailed as soon as it is longer than max_bytes."""
        content = bytearray()
        async for piece in self.pieces():
            content += piece
            if max_bytes is not None and len(content) > max_bytes:
                raise HttpFailed(f"its answer is too long: at most {max_bytes} bytes are read")
        return bytes(content)

    async def beginning(self, num_bytes: int) -> str:
        """At least so many bytes as text, where there are so many."""
        content = b""
        async for piece in self.pieces():
            content += piece
            if len(content) >= num_bytes:
                break
        return content.decode(errors="replace")

    async def aclose(self) -> None:
        """Hang up: at once, whatever is on its way."""
        await self._client.aclose()


@contextlib.contextmanager
def _told_plainly(url: str) -> Iterator[None]:
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
