"""One JSON request over HTTP/1.1 without a thread, so that a deadline can end it anywhere (RFC
9112).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_MOST_BYTES = 8 << 20


class HttpFailed(RuntimeError):
    """No usable answer. status: 0 where there was none at all; retry_after: seconds, if told."""

    def __init__(self, why: str, status: int = 0, retry_after: float = 0.0) -> None:
        self.status, self.retry_after = status, retry_after
        super().__init__(why)


async def post_json(url: str, body: Any, headers: Mapping[str, str]) -> Any:
    """The answer's JSON. Raises HttpFailed for any other status than 200 and for any other content.
    Proxies are not used. The caller sets the deadline.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    data = json.dumps(body).encode()
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        "Accept": "application/json",
        "Connection": "close",
        **headers,
    }
    head = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in one or "\n" in one for one in head):
        raise HttpFailed("a header has a line break")
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, port, ssl=ssl.create_default_context() if secure else None
        )
    except OSError as error:
        raise HttpFailed(f"no connection to {parts.hostname}:{port}: {error}") from None
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await writer.drain()
        status, answered, content = await _answer(reader)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise HttpFailed(f"{parts.hostname}:{port} broke off: {error}") from None
    finally:
        writer.close()
        with contextlib.suppress(Exception):
            writer.transport.abort()
    if status != 200:
        said = content[:300].decode(errors="replace").strip()
        raise HttpFailed(f"status {status}: {said}", status, _seconds(answered))
    try:
        return json.loads(content)
    except ValueError:
        raise HttpFailed(f"no JSON: {content[:100].decode(errors='replace')}", status) from None


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    status = 100
    while 100 <= status < 200:  # 100 Continue comes before the answer proper
        line = (await reader.readline()).split(maxsplit=2)
        if len(line) < 2 or not line[0].startswith(b"HTTP/"):
            raise ValueError("no HTTP status line")
        status, fields = int(line[1]), {}
        while (line_read := await reader.readline()) not in (b"\r\n", b"\n"):
            if not line_read:
                raise ValueError("the header ends early")
            name, _, value = line_read.decode("latin-1").partition(":")
            fields[name.strip().lower()] = value.strip()
    if "chunked" in fields.get("transfer-encoding", "").lower():
        return status, fields, await _chunks(reader)
    if "content-length" in fields:
        return status, fields, await reader.readexactly(_bounded(int(fields["content-length"])))
    content = await reader.read(_MOST_BYTES)
    while not reader.at_eof():
        content += await reader.read(_MOST_BYTES)
        _bounded(len(content))
    return status, fields, content


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        _bounded(len(content) + size)
        content += await reader.readexactly(size)
        await reader.readline()
    return content


def _bounded(size: int) -> int:
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"its answer has {size} bytes, at most {_MOST_BYTES} are read")
    return size


def _seconds(fields: Mapping[str, str]) -> float:
    with contextlib.suppress(ValueError):
        return max(0.0, float(fields.get("retry-after", "0")))
    return 0.0  # a date, which we do not follow
