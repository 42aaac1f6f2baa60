"""The tool `python`: programs of the model, each in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from unirl.llm.agents.tools.tool import Call, Opened, Prepared, ToolSpec
from unirl.llm.sandbox.box import SandboxCounts, Sandboxes
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.llm.sandbox.tool import PythonTool

_SPEC = ToolSpec(
    "python",
    "Run a Python program and read what it prints. Nothing is kept between calls.",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "A whole program."}},
        "required": ["code"],
        "additionalProperties": False,
    },
)


class PythonSource:
    """Sandboxes are started with the first episode, on its event loop."""

    def __init__(self, config: SandboxConfig, counts: SandboxCounts | None = None) -> None:
        self._config, self._lock = config, asyncio.Lock()
        self._counts = counts or SandboxCounts()
        self._sandboxes: Sandboxes | None = None

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return (_SPEC,)

    async def open(self, task: Mapping[str, Any]) -> Opened:
        async with self._lock:
            if self._sandboxes is None:
                self._sandboxes = await make_sandboxes(self._config, self._counts)
        return _Opened(PythonTool(self._sandboxes, self._counts), self._config.seconds)

    async def close(self) -> None:
        if self._sandboxes is not None:
            await self._sandboxes.close()
            self._sandboxes = None


class _Opened:
    def __init__(self, tool: PythonTool, seconds: float) -> None:
        self._tool, self._seconds = tool, seconds

    def calls(self) -> Mapping[str, Call]:
        return {"python": Prepared(self._ready)}

    @contextlib.asynccontextmanager
    async def _ready(self) -> AsyncIterator[Call]:
        async with self._tool.ready() as run:

            async def call(arguments: dict[str, Any]) -> str:
                return await run(arguments["code"], self._seconds)

            yield call

    async def close(self) -> None:
        """Each call had a box of its own."""
