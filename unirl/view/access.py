"""Who may ask: a browser that was given the token, and nobody else."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from unirl.view.answers import error

_HEADERS = (
    (b"content-security-policy",
     b"default-src 'self'; img-src 'self' data:; "
     b"object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)  # fmt: skip
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Access:
    """Lets requests through that carry the token: in a cookie, which `/?token=T` sets, or in
    `Authorization: Bearer T`.
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        # Cookies are of a host, whatever its port: two servers must not take each other's away.
        self._cookie = f"unirl-view-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await self._answer(scope)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> App:
        headers = dict(scope["headers"])
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_right(given):
            # Away from the address line, from history and from what is copied.
            from starlette.responses import RedirectResponse

            found = RedirectResponse("/", 303)
            found.set_cookie(
                self._cookie, self._token.decode(), path="/", httponly=True, samesite="strict"
            )
            return found
        kind, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if self._is_right(_cookies(headers).get(self._cookie, "")) or (
            kind.lower() == "bearer" and self._is_right(bearer.strip())
        ):
            return self._app
        return error(
            (
                "this page needs its token",
                "every request carries the token that unirl view has printed",
                "open the address that it has printed, with ?token=...",
            ),
            401,
        )

    def _is_right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token)


def _cookies(headers: dict[bytes, bytes]) -> dict[str, str]:
    try:
        found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in found.items()}
