"""Boxes that were left alone are closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from unirl.llm.sandbox.box import SandboxFailed


class Idle:
    """Calls `expire` once a box was not used for so many seconds. Belongs to an event loop."""

    def __init__(
        self, seconds: float, is_busy: Callable[[], bool], expire: Callable[[], None]
    ) -> None:
        self._seconds, self._is_busy, self._expire = seconds, is_busy, expire
        self._used = time.monotonic()
        self._is_expired = False
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def touch(self) -> None:
        """It was used."""
        self._used = time.monotonic()

    def stop(self) -> None:
        """It is closed; idempotent."""
        if self._timer:
            self._timer.cancel()

    def require_not_expired(self) -> None:
        """Raises SandboxFailed."""
        if self._is_expired:
            idle = f"sandbox.idle_seconds is {self._seconds:g}"
            raise SandboxFailed("a box was left alone and is closed", idle, "raise it")

    def _look(self) -> None:
        left = self._used + self._seconds - time.monotonic()
        if left > 0 or self._is_busy():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(left, 1.0), self._look)
        else:
            self._is_expired = True
            self._expire()
