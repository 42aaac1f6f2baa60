"""vLLM's OpenAI-compatible server with what UniRL needs in it, as a process of its own.

By hand: python -m unirl.llm.engines.vllm.server --model DIR --port 8000, and any other flag of
vLLM's server; then engine.kind vllm with engine.url http://127.0.0.1:8000/v1. It listens on this
machine alone unless --host says otherwise: its development endpoints are open to whoever reaches
it.
Source: vllm.entrypoints.openai.api_server.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import TracebackType

from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.engines.vllm.arguments import (
    engine_arguments,
    import_vllm,
    model_folder,
    shown,
    variables,
)
from unirl.llm.engines.vllm.parent_watch import OWNER, hold_on, owner_tag
from unirl.llm.engines.vllm.worker import BACKEND, EXTENSION
from unirl.llm.models.model import ModelConfig
from unirl.llm.weights.own_folder import OwnFolder

_SERVER = "vllm.entrypoints.openai.api_server"
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
        flags = shown(engine_arguments(self._config, self._model, folder))
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
            # Its session is its own: whoever is left in it belongs to it.
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


def main() -> None:
    """Run vLLM's server in this process, with the flags UniRL needs where they are not given."""
    import_vllm()
    os.environ.setdefault("VLLM_SERVER_DEV_MODE", "1")
    for name, value in variables(EngineConfig(kind="vllm")).items():
        os.environ.setdefault(name, value)
    needed = {
        "--host": _LOOPBACK,
        "--worker-extension-cls": EXTENSION,
        "--weight-transfer-config": f'{{"backend": "{BACKEND}"}}',
        "--logprobs-mode": "processed_logprobs",
    }
    for flag, value in needed.items():
        if not any(one.split("=")[0] == flag for one in sys.argv):
            sys.argv += [flag, value]
    hold_on()
    runpy.run_module(_SERVER, run_name="__main__")


if __name__ == "__main__":
    main()
