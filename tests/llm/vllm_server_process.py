"""vLLM's server as UniRL starts it, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.engines.vllm.arguments import (
    engine_arguments,
    import_vllm,
    model_folder,
    variables,
)
from unirl.llm.engines.vllm.parent_watch import OWNER, owner_tag
from unirl.llm.models.model import ModelConfig
from unirl.llm.weights.own_folder import OwnFolder

_LOOPBACK = "127.0.0.1"


class VllmServer:
    """A server on a free port of this machine, between `with`: it ends with this process at the
    latest, whatever ends that.

    url: for EngineConfig.url. Raises EngineFailed when it is not up in engine.timeout_seconds.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig | None = None) -> None:
        self._model, self._config = model, config or EngineConfig(kind="vllm")
        self._scratch = OwnFolder("vllm")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.served = ""
        """The name it serves the model under: for ModelConfig.path of its clients."""

    def __enter__(self) -> VllmServer:
        import_vllm()
        folder = self.served = model_folder(self._model, self._scratch)
        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            port = probe.getsockname()[1]
        flags = as_flags(engine_arguments(self._config, self._model, folder))
        environment = variables(self._config) | dict(os.environ) | {OWNER: owner_tag()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unirl.llm.engines.vllm.server", "--port", str(port), *flags],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.url = f"http://{_LOOPBACK}:{port}/v1"
        try:
            self._wait(port)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it with all its processes; idempotent."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            # Its session is its own: what is left in it belongs to it.
            end = time.monotonic() + 10
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < end:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.poll()
                    time.sleep(0.02)
            self._process.wait()
            self._process = None
        self._scratch.remove()

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def _wait(self, port: int) -> None:
        assert self._process is not None
        end = time.monotonic() + self._config.timeout_seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise EngineFailed(
                    f"vLLM's server ended with {self._process.returncode}",
                    "it must stay up",
                    "its own messages above name the cause",
                )
            try:
                with urllib.request.urlopen(f"http://{_LOOPBACK}:{port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise EngineFailed(
            "vLLM's server does not come up",
            f"engine.timeout_seconds allows {self._config.timeout_seconds:g} s",
            "raise it, or look in the log for what it waits for",
        )


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as flags of vLLM's server."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        else:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            flags += [flag, text]
    return flags
