"""An answer on its way to the client that asked for it.

What nobody has read was of no use to the agent, and is not learned from. A turn counts as read from
when the last piece of its answer is sent to a client that is there; whether that arrives, HTTP does
not say.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

_Message = MutableMapping[str, Any]
_LOOKS = 5
"""Turns of the event loop in which what the connection already knows comes up."""
_PIECE = 1 << 16
"""Bytes: about what is on its way before a sender has to wait for the reader."""


class Reader:
    """The client of one request, once its body was read."""

    def __init__(self, receive: Callable[[], Awaitable[_Message]]) -> None:
        self._gone = asyncio.ensure_future(_disconnected(receive))

    async def awaits(self, work: Future[Any]) -> bool:
        """Whether it was there until this had ended."""
        both: set[Future[Any]] = {work, self._gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return work.done() and await self.is_there()

    @property
    def has_left(self) -> bool:
        """As far as is known."""
        return self._gone.done()

    async def is_there(self) -> bool:
        for _ in range(_LOOKS):
            if not self._gone.done():
                await asyncio.sleep(0)
        return not self._gone.done()

    def forget(self) -> None:
        self._gone.cancel()


class Delivery:
    """A response (ASGI). pieces: of its body, one at least. own: called where the client is still
    there when all but the last piece was sent.
    """

    def __init__(
        self,
        reader: Reader,
        pieces: Sequence[bytes],
        headers: Mapping[str, str],
        own: Callable[[], None],
    ) -> None:
        self._reader, self._pieces, self._own = reader, pieces, own
        self._headers = [(key.encode(), value.encode()) for key, value in headers.items()]

    async def __call__(
        self, scope: Any, receive: Any, send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        *most, last = self._pieces
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            for piece in most:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)  # for the connection to say that it is lost
                if self._reader.has_left:
                    return
            # Not behind the last piece: a client that has it may act on it, or close.
            if await self._reader.is_there():
                self._own()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._reader.forget()


def cut(data: bytes) -> list[bytes]:
    """Pieces of an answer that is no stream."""
    return [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]


async def _disconnected(receive: Callable[[], Awaitable[_Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
