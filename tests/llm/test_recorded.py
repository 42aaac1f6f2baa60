"""A network that is recorded: what programs may ask, what is kept, and that it is replayed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from unirl.errors import UniRLError
from unirl.llm.sandbox.box import Sandboxes, boxed, run_once
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes

ASK = """
import sys, urllib.error, urllib.request
def ask(url, data=None):
    try:
        with urllib.request.urlopen(url, data, timeout=20) as found:
            return found.status, found.headers.get("X-Count"), found.read()
    except urllib.error.HTTPError as error:
        return error.code, None, error.read()
"""


class Upstream(BaseHTTPRequestHandler):
    """Counts what it is asked."""

    asked: ClassVar[list[tuple[str, str, bytes]]]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, body))
        said = f"{self.command} {self.path} {body.decode()}".encode()
        if self.path == "/large":
            said = b"x" * (17 << 20)
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("X-Count", str(len(self.asked)))
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    class Handler(Upstream):
        asked: ClassVar[list[tuple[str, str, bytes]]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", Handler.asked
    server.shutdown()
    thread.join()
    server.server_close()


async def made(config: SandboxConfig) -> Sandboxes:
    try:
        return await make_sandboxes(config)
    except UniRLError as error:
        pytest.skip(f"this machine has no namespaces for it: {error}")


def recorded(folder: Path, host: str, **settings: Any) -> SandboxConfig:
    return SandboxConfig(
        network="recorded", hosts=(f"http://{host}",), recording=str(folder), slots=1, **settings
    )


def test_what_was_asked_once_is_answered_from_what_was_kept(
    tmp_path: Path, upstream: tuple[str, list[Any]]
) -> None:
    host, asked = upstream
    program = f"{ASK}\nfor _ in range(2): print(ask('http://{host}/a?b=1'))\n"
    program += f"print(ask('http://{host}/p', b'x'), ask('http://{host}/p', b'y'))\n"
    program += f"print(ask('http://{host}/none'))"

    async def run(config: SandboxConfig) -> str:
        sandboxes = await made(config)
        texts = {(await run_once(sandboxes, program)).text for _ in range(2)}
        async with boxed(sandboxes) as box:
            texts.add((await box.run(program)).text)
        assert "with a proxy" in sandboxes.level.holds["network"]
        await sandboxes.close()
        (text,) = texts
        return text

    config = recorded(tmp_path / "kept", host)
    text = asyncio.run(run(config))
    assert text.splitlines() == [
        "(200, '1', b'GET /a?b=1 ')",
        "(200, '1', b'GET /a?b=1 ')",
        "(200, '2', b'POST /p x') (200, '3', b'POST /p y')",
        "(404, None, b'GET /none ')",
    ]
    assert len(asked) == 4
    replayed = dataclasses.replace(config, network="replayed", hosts=(f"http://{host}",))
    assert asyncio.run(run(replayed)) == text and len(asked) == 4


def test_programs_reach_the_proxy_and_nothing_else(
    tmp_path: Path, upstream: tuple[str, list[Any]]
) -> None:
    host, asked = upstream
    name, port = host.split(":")
    program = f"""{ASK}
import os, socket
print(ask("http://localhost:{port}/"))                  # another name is another host
print(ask("http://{host}/large"))
try:
    ask("https://{host}/")
except urllib.error.URLError as error:
    print("encrypted", error)
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("{name}", {port})),      # past the proxy
    (socket.AF_INET, socket.SOCK_STREAM, ("10.0.0.1", 80)),
    (socket.AF_INET6, socket.SOCK_STREAM, ("::1", {port})),
):
    try:
        socket.socket(family, kind).connect(address)
        print("reached", address)
    except OSError:
        pass
one = socket.create_connection(("127.0.0.1", 3128))
one.sendall(b"no HTTP at all\\r\\n\\r\\n")
print(one.recv(100)[:12])
for _ in range(20):
    said = ask("http://{host}/again")
print(said)
"""

    async def run() -> str:
        sandboxes = await made(recorded(tmp_path, host, max_requests=10))
        text = (await run_once(sandboxes, program)).text
        again = (await run_once(sandboxes, f"{ASK}\nprint(ask('http://{host}/again'))")).text
        await sandboxes.close()
        return text + again

    lines = asyncio.run(run()).splitlines()
    assert lines[0].startswith("(403, None, b'localhost:") and "may not be asked" in lines[0]
    assert lines[1].startswith("(502") and "more than 16777216 bytes" in lines[1]
    assert lines[2].startswith("encrypted") and "501" in lines[2]
    assert lines[3] == "b'HTTP/1.1 400'"
    assert lines[4].startswith("(429") and "max_requests is 10" in lines[4]
    assert lines[5].startswith("(200"), "another box may ask as often as the first"
    assert [path for _, path, _ in asked] == ["/large", "/again"]


def test_what_is_not_in_a_recording_or_does_not_answer_is_said(tmp_path: Path) -> None:
    async def run(config: SandboxConfig) -> str:
        sandboxes = await made(config)
        text = (await run_once(sandboxes, f"{ASK}\nprint(ask('http://127.0.0.1:9/'))")).text
        await sandboxes.close()
        return text

    config = recorded(tmp_path, "127.0.0.1:9")
    assert asyncio.run(run(config)).startswith("(502")
    assert list(tmp_path.iterdir()) == []
    replayed = dataclasses.replace(config, network="replayed")
    text = asyncio.run(run(replayed))
    assert text.startswith("(504") and "not in the recording" in text


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match=r"sandbox\.recording"):
        SandboxConfig(network="recorded")
    with pytest.raises(UniRLError, match="without a path"):
        recorded(tmp_path, "a.b/c")
    nothing = SandboxConfig(network="replayed", recording=str(tmp_path / "none"))
    with pytest.raises(UniRLError, match="no recording in"):
        asyncio.run(make_sandboxes(nothing))
    with pytest.raises(UniRLError, match="levels zygote"):
        asyncio.run(make_sandboxes(recorded(tmp_path, "a.b", kind="bwrap")))
