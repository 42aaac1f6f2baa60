"""A Python interpreter as a tool of a model: code in, what it printed out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from unirl.llm.sandbox.box import Ran, SandboxCounts, Sandboxes, SandboxFailed

_WAIT_SECONDS = 300.0
"""For a box that is free."""
_HALF = 2000
"""Characters that are kept of each end of a long output."""


class PythonTool:
    """Runs code, each time in a box of its own."""

    def __init__(self, sandboxes: Sandboxes, counts: SandboxCounts | None = None) -> None:
        self._sandboxes, self._counts = sandboxes, counts or SandboxCounts()

    async def run(self, code: str, seconds: float) -> str:
        """What the model is given: what the code printed, and how it ended if not well. Raises
        SandboxFailed.
        """
        async with self.ready() as run:
            return await run(code, seconds)

    @contextlib.asynccontextmanager
    async def ready(self) -> AsyncIterator[Callable[[str, float], Awaitable[str]]]:
        """`run` for one program, once a box is free for it."""
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                box = await self._sandboxes.open()
        except TimeoutError:
            self._counts.refusals += 1
            raise SandboxFailed(
                "no sandbox is free",
                f"all were in use for {_WAIT_SECONDS:g} s",
                "raise sandbox.slots",
            ) from None

        async def run(code: str, seconds: float) -> str:
            return as_text(await box.run(code, seconds=seconds), seconds)

        try:
            yield run
        finally:
            await box.close()


def as_text(ran: Ran, seconds: float) -> str:
    """How a program ended, in words for a model."""
    text = ran.text.rstrip()
    if len(text) > 2 * _HALF:
        left_out = len(text) - 2 * _HALF
        text = f"{text[:_HALF]}\n... {left_out} characters left out ...\n{text[-_HALF:]}"
    ending = {
        "time": f"It was ended after {seconds:g} seconds.",
        "output": "It was ended: it printed too much.",
        "memory": "It was ended: it used too much memory.",
        "crash": "It was ended: it crashed.",
        "": "" if ran.rc == 0 else f"Exit code {ran.rc}.",
    }[ran.killed]
    return "\n".join(part for part in (text, ending) if part) or "(no output)"
