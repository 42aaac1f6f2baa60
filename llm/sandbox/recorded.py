"""A network that is recorded: what programs in boxes ask of the hosts that they may ask, and are
answered, is kept, and the same question has the same answer from then on. `replayed` asks nobody.

Within a box there is one address: an HTTP proxy, whose socket was opened in the box's namespace and
is served from outside, here. Programs find it in http_proxy. They ask for http://HOST/...; where a
host is allowed as https://HOST, it is asked that way. What is encrypted before it comes here cannot
be recorded, so CONNECT is refused.

Source: RFC 9110 and 9112, parsed by h11.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from unirl.errors import UniRLError
from unirl.llm.packages import needs
from unirl.llm.sandbox.box import MiB, SandboxFailed
from unirl.llm.sandbox.config import SandboxConfig
from unirl.storage.disk import replace_text

MAX_BODY = 16 * MiB
"""Of a question or an answer."""
_ASK_SECONDS = 60.0
_IDLE_SECONDS = 30.0
_CHUNK = 65536
_OWN_TO_A_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
     b"proxy-connection", b"transfer-encoding", b"upgrade", b"content-length", b"host")
)  # fmt: skip


class _Answer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Recorder:
    """What was asked and answered, in a folder; for all boxes of one process."""

    def __init__(self, config: SandboxConfig) -> None:
        with needs("h11", f'sandbox.network "{config.network}" needs an HTTP parser'):
            import h11  # noqa: F401
            import httpx2
        self._replays = config.network == "replayed"
        self._origins = {each.partition("://")[2]: each for each in config.hosts}
        self._folder = Path(config.recording)
        self._client = httpx2.AsyncClient(timeout=_ASK_SECONDS, trust_env=False)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.num_asked = 0
        """How often a host was asked, as no answer was kept."""
        if self._replays and not self._folder.is_dir():
            raise UniRLError(
                f"there is no recording in {self._folder}",
                "sandbox.network replayed answers from sandbox.recording alone",
                "record one first, with sandbox.network recorded",
            )

    async def answer(
        self, method: str, url: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> _Answer:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.netloc:
            return _said(400, f"{url!r} is no http:// address")
        if parts.netloc not in self._origins:
            known = ", ".join(self._origins) or "none"
            return _said(403, f"{parts.netloc} may not be asked; sandbox.hosts are {known}")
        digest = blake2b(f"{method}\0{url}\0".encode() + body, digest_size=16)
        path = self._folder / f"{digest.hexdigest()}.json"
        # Two that ask for the same at once have one answer.
        lock = self._asking.setdefault(path.name, asyncio.Lock())
        async with lock:
            if path.is_file():
                return _kept(path)
            if self._replays:
                return _said(504, f"{method} {url} is not in the recording")
            target = f"{self._origins[parts.netloc]}{url[len('http://') + len(parts.netloc) :]}"
            try:
                answer = await self._ask(method, target, headers, body)
            except Exception as error:  # of the host or the way to it: asked again the next time
                return _said(502, f"{target}: {type(error).__name__}: {error}"[:500])
            self._keep(path, method, url, answer)
            return answer

    async def _ask(
        self, method: str, url: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> _Answer:
        self.num_asked += 1
        given = [each for each in headers if each[0].lower() not in _OWN_TO_A_CONNECTION]
        content = bytearray()
        async with self._client.stream(method, url, headers=given, content=body or None) as found:
            async for data in found.aiter_raw():
                content += data
                if len(content) > MAX_BODY:
                    return _said(502, f"{url} answered with more than {MAX_BODY} bytes")
            kept = [
                each for each in found.headers.raw if each[0].lower() not in _OWN_TO_A_CONNECTION
            ]
            return _Answer(found.status_code, kept, bytes(content))

    def _keep(self, path: Path, method: str, url: str, answer: _Answer) -> None:
        about = {
            "method": method,
            "url": url,
            "status": answer.status,
            "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in answer.headers],
            "body": base64.b64encode(answer.body).decode(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(about))

    async def close(self) -> None:
        await self._client.aclose()


def _kept(path: Path) -> _Answer:
    about: dict[str, Any] = json.loads(path.read_bytes())
    headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in about["headers"]]
    return _Answer(int(about["status"]), headers, base64.b64decode(about["body"]))


def _said(status: int, text: str) -> _Answer:
    return _Answer(status, [(b"content-type", b"text/plain; charset=utf-8")], text.encode())


class Door:
    """The proxy of one slot: its socket lives in the slot's namespace, who serves it here."""

    def __init__(self, recorder: Recorder, listener: socket.socket, max_requests: int) -> None:
        self._recorder, self._listener = recorder, listener
        self._max, self._left = max_requests, max_requests
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    def renew(self) -> None:
        """For another box: it may ask as often as a new one."""
        self._left = self._max

    def close(self) -> None:
        """Idempotent; also where no event loop runs any more."""
        with contextlib.suppress(RuntimeError):
            if self._server is not None:
                self._server.close()
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import h11

        try:
            async with asyncio.timeout(_IDLE_SECONDS + _ASK_SECONDS):
                connection = h11.Connection(h11.SERVER, max_incomplete_event_size=65536)
                try:
                    answer = await self._answered(connection, reader)
                except h11.RemoteProtocolError as error:
                    answer = _said(400, f"this is no HTTP: {error}")
                if answer is None:
                    return
                headers = [
                    *answer.headers,
                    (b"content-length", str(len(answer.body)).encode()),
                    (b"connection", b"close"),
                ]
                response = h11.Response(status_code=answer.status, headers=headers)
                events = (response, h11.Data(data=answer.body), h11.EndOfMessage())
                writer.write(b"".join(connection.send(each) or b"" for each in events))
                await writer.drain()
        except (OSError, TimeoutError, h11.LocalProtocolError):
            pass  # the program left, or does not read
        finally:
            writer.close()

    async def _answered(self, connection: Any, reader: asyncio.StreamReader) -> _Answer | None:
        """None: nothing was asked."""
        import h11

        request, body = None, bytearray()
        async for event in _events(connection, reader):
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY:
                    return _said(413, f"at most {MAX_BODY} bytes can be sent")
        if request is None:
            return None
        method = request.method.decode()
        if method == "CONNECT":
            return _said(
                501,
                "what is encrypted cannot be recorded: ask for http://, which is asked for by "
                "https:// where sandbox.hosts says so",
            )
        if self._left <= 0:
            return _said(429, f"sandbox.max_requests is {self._max}")
        self._left -= 1
        return await self._recorder.answer(
            method, request.target.decode("latin-1"), list(request.headers), bytes(body)
        )


async def _events(connection: Any, reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Of one request, up to its end or the end of the connection."""
    import h11

    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_CHUNK))
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed) or event is h11.PAUSED:
            return
        else:
            yield event


def listener_of(fds: list[int]) -> socket.socket:
    """The socket that a zygote sent. Raises SandboxFailed."""
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise SandboxFailed("a sandbox does not start", "it sent no socket", "start another")
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener
