"""vLLM's OpenAI-compatible server with what UniRL needs in it, as a process of its own.

By hand: python -m unirl.llm.engines.vllm.server --model DIR --port 8000, and any other flag of
vLLM's server; then engine.kind vllm with engine.url http://127.0.0.1:8000/v1. It listens on this
machine alone unless --host says otherwise: its development endpoints are open to every
process that reaches it.

Source: vllm.entrypoints.openai.api_server.
"""

from __future__ import annotations

import os
import runpy
import sys

from unirl.llm.engine import EngineConfig
from unirl.llm.engines.vllm.arguments import import_vllm, variables
from unirl.llm.engines.vllm.parent_watch import watch_owner
from unirl.llm.engines.vllm.worker import BACKEND, EXTENSION

_SERVER = "vllm.entrypoints.openai.api_server"
_LOOPBACK = "127.0.0.1"


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
    watch_owner()
    runpy.run_module(_SERVER, run_name="__main__")


if __name__ == "__main__":
    main()
