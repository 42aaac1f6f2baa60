"""An engine on a node of a Ray cluster: python -m tests.cluster.engine_node MODEL. Ray picks a node
that has as many CPUs as ENGINE_CPUS says; its URL, its process and its node are printed, and it
ends with its standard input.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any


class EngineNode:
    """An actor of Ray."""

    def __init__(self, model: str) -> None:
        serve = ["serve", model, "--tokens", "--port", "0", "--key-variable", "UNIRL_ENGINE_KEY"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unirl", *serve],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def where(self) -> dict[str, Any]:
        import ray

        assert self._process.stdout is not None
        found = re.search(r"engine.url=(\S+)", self._process.stdout.readline())
        assert found is not None, "the engine does not start"
        node = ray.get_runtime_context().get_node_id()
        return {"url": found[1], "pid": self._process.pid, "node": node}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def main() -> None:
    import ray

    ray.init(address=os.environ["ENGINE_CLUSTER"], log_to_driver=False)
    actor: Any = ray.remote(num_cpus=float(os.environ["ENGINE_CPUS"]))(EngineNode)
    engine = actor.remote(sys.argv[1])
    print(json.dumps(ray.get(engine.where.remote(), timeout=120)), flush=True)
    try:
        sys.stdin.read()
    finally:
        ray.get(engine.stop.remote(), timeout=60)


if __name__ == "__main__":
    main()
