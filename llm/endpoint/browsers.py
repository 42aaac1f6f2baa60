"""Refuses what a browser sends in the name of a page.

Any page may make its visitor's browser send requests to this machine, and where its author points a
name of their own here (DNS rebinding), it may read the answers, too. But a browser says in Origin
which page asks, in Host under which name, and sends JSON to others only where they agree.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from unirl.llm.endpoint import chat, messages
from unirl.llm.endpoint.dialect import BadRequest, shown

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
App = Callable[[Any, _Receive, _Send], Awaitable[None]]
_PRIVATE = (".localhost", ".local", ".internal")
"""Ends of names that nobody can register."""


class NoBrowsers:
    """An ASGI app before another one. host: the address that is listened on; None: a socket that no
    browser reaches, where any Host will do.
    """

    def __init__(self, app: App, host: str | None) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["method"], _headers(scope))
            except BadRequest as refused:
                await _refuse(scope["path"], refused, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: dict[str, str]) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._host is not None and host and not _is_ours(host, self._host):
            raise BadRequest(
                f"Host is {shown(host)}; it must be localhost or the address that is listened on, "
                "as a page of others may use a name of its own for this machine",
                403,
            )
        if origin is not None and (not host or urlsplit(origin).netloc.lower() != host.lower()):
            raise BadRequest(
                f"Origin is {shown(origin)}: pages are not served; ask with a program", 403
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise BadRequest(f"Content-Type must be application/json, it is {shown(kind)}", 415)


def _headers(scope: Any) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]}  # fmt: skip


def _is_ours(given: str, bound: str) -> bool:
    """Whether a Host stands for this machine, and cannot be a name that somebody points to it."""
    try:
        name = (urlsplit(f"//{given}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in ("localhost", bound.lower()):
        return True
    address, listens = _address(name), _address(bound)
    if address is not None and address.is_loopback:
        return True
    if listens is None or not listens.is_unspecified:
        return address is not None and address == listens
    # All addresses are listened on: which of them are ours is not known here.
    own = {socket.gethostname().lower()}
    return address is not None or name in own or "." not in name or name.endswith(_PRIVATE)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None


async def _refuse(path: str, refused: BadRequest, send: _Send) -> None:
    dialect = messages if path.endswith(("/messages", "/count_tokens")) else chat
    data = json.dumps(dialect.error(str(refused), refused.status, None)).encode()
    # What the client has still to send is not read: the connection ends with the answer.
    headers = [(b"content-type", b"application/json"), (b"connection", b"close"),
               (b"content-length", str(len(data)).encode())]  # fmt: skip
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})
