"""The process of a node agent, as Ray starts it. It imports little until its fork server, which
imports torch for all members, is on its way: both take seconds, side by side.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading

from unirl.errors import UniRLError
from unirl.supervision.fork_server import process_context

_LINGER_SECONDS = 10.0
"""A process that ends by itself is a fault to Ray, which says so to the user."""


class AgentActor:
    """search_path, folder: where the driver finds modules. modules, preload: of the fork server."""

    def __init__(
        self, search_path: list[str], folder: str, modules: list[str], preload: list[str]
    ) -> None:
        sys.path += [path for path in search_path if path not in sys.path and os.path.isdir(path)]
        with contextlib.suppress(OSError):
            os.chdir(folder)
        process_context(1, modules, preload)

    def start(self, setup: bytes) -> int:
        """Start members; the process id when they run. setup: an AgentSetup of the driver, which
        came by Ray's own connection.
        """
        from unirl.runners.cluster.agent import NodeAgent, run_agent

        try:
            found = pickle.loads(setup)
        except (ImportError, AttributeError) as error:
            raise UniRLError(
                f"node {socket.gethostname()} lacks what the plan names: {error}",
                "actors and what they import must be importable on each node, and not be defined "
                "in the script that is run",
                "put it into a module, and that into PYTHONPATH on each node or into `ray job "
                "submit --working-dir`",
            ) from None
        work = (NodeAgent(found), _LINGER_SECONDS)
        threading.Thread(target=run_agent, args=work, name="agent", daemon=True).start()
        return os.getpid()
