"""What browsers send for pages of others does not reach a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("starlette", reason="the endpoint needs the extra agents")
pytest.importorskip("uvicorn", reason="the endpoint needs the extra agents")

import httpx2

from tests.llm.agents.hosted import Hosted, hosted, scripted
from unirl.llm.endpoint.browsers import NoBrowsers

BODY = json.dumps({"messages": [{"role": "user", "content": "what is 12 and 30?"}]})
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def host() -> Iterator[Hosted]:
    with hosted() as one:
        yield one


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"origin": "https://elsewhere.example"}, 403, "pages are not served"),
        ({"origin": "null"}, 403, "pages are not served"),
        ({"host": "elsewhere.example"}, 403, "it must be localhost"),
        ({"host": "[::1"}, 403, "it must be localhost"),
        ({"content-type": "text/plain"}, 415, "must be application/json"),
        ({"content-type": ""}, 415, "must be application/json"),  # as of a Blob
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
        ({"host": "localhost:1"}, 200, ""),
        ({"host": "[::1]"}, 200, ""),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200, ""),
    ],
)
def test_what_a_browser_sends_for_a_page_is_refused(
    host: Hosted, headers: dict[str, str], status: int, says: str
) -> None:
    session, key = host.open(scripted("yes", "yes"))
    for path in ("chat/completions", "messages"):
        url = f"{host.endpoint.url(key)}/{path}"
        answer = httpx2.post(url, content=BODY, headers={**JSON, **headers}, timeout=60)
        assert answer.status_code == status
        assert says in answer.text and len(session.episode.turns) == (status == 200) * (
            1 + (path == "messages")
        )


@pytest.mark.parametrize(
    ("bound", "names", "others"),
    [
        ("10.0.0.7", ["10.0.0.7:80", "localhost", "127.0.0.2"], ["10.0.0.8", "a.example", "a"]),
        ("gpu.example", ["gpu.example:80", "GPU.example."], ["a.example", "10.0.0.8"]),
        ("0.0.0.0", ["10.0.0.8", "node7", "host.docker.internal", "[fe80::1]"], ["a.example"]),
        ("::", ["10.0.0.8", "a.local:80"], ["a.example", "local.example"]),
    ],
)
def test_a_host_is_ours_or_refused(bound: str, names: list[str], others: list[str]) -> None:
    async def served(name: str) -> bool:
        found = False

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal found
            found = True

        async def send(message: Any) -> None:
            assert message.get("status", 403) == 403

        scope = {"type": "http", "method": "GET", "path": "/v1/models"}
        scope |= {"headers": [(b"host", name.encode())]}
        await NoBrowsers(app, bound)(scope, send, send)
        return found

    assert [asyncio.run(served(name)) for name in names] == [True] * len(names)
    assert [asyncio.run(served(name)) for name in others] == [False] * len(others)
