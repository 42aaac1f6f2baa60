"""Requests to the view's application, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.view.access import App
from unirl.view.server import make_app
from unirl.view.view import View

TOKEN = "a-token"


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> list[str]:
        found: list[str] = self.value["error"]
        assert len(found) == 3
        return found


class Asker:
    """What asks a view of some folders, with its token."""

    def __init__(self, *roots: Path, port: int = 8265, store_url: str = "") -> None:
        self.view = View(roots, store_url)
        self.app = make_app(self.view, TOKEN, port)

    def __call__(self, target: str) -> Answered:
        return ask(self.app, target, {"authorization": f"Bearer {TOKEN}"})

    def id(self, name: str) -> str:
        found: str = next(each["id"] for each in self("/api/runs").value if each["name"] == name)
        return found

    def of(self, name: str, path: str = "") -> Answered:
        return self(f"/api/runs/{self.id(name)}{path}")


def ask(app: App, target: str, headers: Mapping[str, str] | None = None) -> Answered:
    path, _, query = target.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": path, "raw_path": path.encode("utf-8", "surrogateescape"),
        "query_string": query.encode("utf-8", "surrogateescape"), "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "extensions": {},
    }  # fmt: skip
    sent: list[MutableMapping[str, Any]] = []

    asked = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()  # a client that stays
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return Answered(sent[0]["status"], found, body)
