"""How much of a GPU vLLM may take where the learner is on it already. By itself vLLM takes nearly
all of the GPU, and refuses to start where that much is not free.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import torch

from unirl.errors import UniRLError
from unirl.host import local_rank
from unirl.llm.device import device_of
from unirl.llm.engine import EngineConfig

OPTION = "gpu_memory_utilization"
"""vLLM's own name for it, among engine.options: the part of the whole GPU."""
SHARE_OF_FREE = 0.5
"""What of the free memory the engine gets. The learner has its weights by then; its gradients, the
moments of its optimiser and what a backward pass needs come later, and are larger."""
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_ASK = "import json, torch; print(json.dumps(torch.cuda.mem_get_info({index})))"
_ASK_SECONDS = 120.0


def beside_learner(engine: EngineConfig, learner_device: str) -> EngineConfig:
    """The engine's settings, with its part of the GPU where it shares the learner's and the user
    has not said otherwise. Call it when the learner has been made.
    """
    given = {name.replace("-", "_"): value for name, value in engine.options.items()}
    if (
        engine.kind != "vllm"
        or engine.is_server
        or given.keys() & {OPTION, "kv_cache_memory_bytes"}
    ):
        return engine
    learner = torch.device(device_of(learner_device, "learner.device"))
    if learner.type != "cuda" or engine.device == "cpu":
        return engine
    # Not by asking for the current one: that would begin to use CUDA here.
    index, num = learner.index or 0, math.prod(int(given.get(name, 1)) for name in _SIZES)
    first = torch.device(engine.device).index or 0 if engine.device != "auto" else 0
    if engine.device == "auto" and torch.cuda.device_count() > num:
        first = (local_rank() or 0) * num
    if index not in range(first, first + num):
        return engine
    free, total = free_memory(index)
    share = f"{share_of(free, total):.3f}"
    return replace(engine, options={**engine.options, OPTION: share})


def share_of(free: int, total: int) -> float:
    """Of the whole GPU, rounded down to thousandths: vLLM compares it with what is free."""
    return int(1000 * SHARE_OF_FREE * free / total) / 1000


def free_memory(index: int) -> tuple[int, int]:
    """Bytes that are free on a GPU, and all it has. A process that uses no GPU asks through another
    one: to look at a GPU takes half a gigabyte of it, for good.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info(index)
        return free, total
    asked = subprocess.run(
        [sys.executable, "-c", _ASK.format(index=index)],
        capture_output=True,
        text=True,
        timeout=_ASK_SECONDS,
    )
    if asked.returncode:
        raise UniRLError(
            f"GPU {index} does not say how much of its memory is free",
            (asked.stderr.strip().splitlines() or ["no reason given"])[-1][:200],
            f"set engine.options.{OPTION}, 0.4 say",
        )
    free, total = json.loads(asked.stdout.splitlines()[-1])
    return int(free), int(total)
