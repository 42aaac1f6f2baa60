"""Serves the view until Ctrl-C, by uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from unirl.llm.packages import needs
from unirl.view.server import View, make_app


def serve(view: View, listening: socket.socket, token: str, ready: Callable[[], None]) -> None:
    """Blocks until the process is to end."""
    with needs("uvicorn", "the view has no server", "view"):
        import uvicorn
    app = make_app(view, token, listening.getsockname()[1])
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # its lines would have the token
        lifespan="off",
        timeout_graceful_shutdown=1,  # pages that watch never end by themselves
    )

    async def run() -> None:
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listening]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready()
        await task

    asyncio.run(run())
