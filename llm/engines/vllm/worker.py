"""What UniRL adds to each of vLLM's workers: a weight-transfer backend, a read-back of what the
worker computes with, and a watch over the process that wants the engine.

vLLM imports this module in its workers (--worker-extension-cls
unirl.llm.engines.vllm.worker.Extension).
Source: vLLM's interface WeightTransferEngine (vllm.distributed.weight_transfer.base).
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from unirl.device import PIECE_BYTES, gpu_of
from unirl.llm.engines.vllm.model_tensors import (
    adapter_readings,
    computed_tensors,
    refresh_tied_heads,
    repack_experts,
)
from unirl.llm.engines.vllm.parent_watch import watch_owner
from unirl.llm.models.checksum import digits
from unirl.llm.weights.group import BroadcastGroup, join
from unirl.llm.weights.layout import MemoryLayout
from unirl.llm.weights.proof import canonical, sampled

BACKEND = "unirl"
"""Its name among vLLM's weight-transfer backends."""
EXTENSION = "unirl.llm.engines.vllm.worker.Extension"

log = logging.getLogger(__name__)


class _Extension:
    """Mixed into vLLM's worker class: what `collective_rpc` calls by name. Arguments are strings,
    answers lists and dictionaries: they may come and go as JSON.
    """

    def unirl_describe(self) -> dict[str, Any]:
        worker: Any = self
        dtype = str(worker.model_config.dtype).removeprefix("torch.")
        about = {"dtype": dtype, "pid": os.getpid(), "device": worker.device.type}
        return about | {"gpu": gpu_of(worker.device)}

    def unirl_proof(self, version: str) -> dict[str, Any]:
        """Readings of what this worker computes with now; see proof.differences."""
        worker: Any = self
        engine: Any = worker.weight_transfer_engine
        dtype = worker.model_config.dtype
        parallel = worker.parallel_config
        received: dict[str, str] = engine.readings
        computed: list[list[str]] = []
        # A worker that holds a shard proves what arrived; a whole one proves what it multiplies
        # with.
        if parallel.tensor_parallel_size == 1 and parallel.pipeline_parallel_size == 1:
            for path, name, value in computed_tensors(
                worker.get_model(), engine.shapes, int(version)
            ):
                computed.append([path, name, digits({name: canonical(value, dtype)})])
        return {
            "version": engine.version,
            "checksum": engine.checksum,
            "computed": computed,
            "received": received,
        }

    def unirl_adapter(self, adapter: str) -> dict[str, Any]:
        """Readings of an adapter as this worker holds it: {layer: [of A, of B]}."""
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        return adapter_readings(manager, int(adapter))


def _backend() -> type:
    """The backend's class; inside a function, because its base needs vllm."""
    from dataclasses import dataclass, field

    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Introduction(WeightTransferInitInfo):  # type: ignore[misc]
        kind: str = "shared"
        host: str = ""
        port: int = 0
        size: int = 0
        backend: str = ""
        seconds: float = 60.0

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        kind: str = "shared"
        version: int = -1
        path: str = ""
        handle: list[Any] = field(default_factory=list)
        table: list[list[Any]] = field(default_factory=list)

    class UniRLTransfer(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = Introduction
        update_info_cls = Update
        supports_draft_weight_update = False

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._group: BroadcastGroup | None = None
            self._memory: Tensor | None = None
            self.version = -1
            self.checksum = ""
            self.readings: dict[str, str] = {}
            self.shapes: dict[str, tuple[int, ...]] = {}

        def init_transfer_engine(self, init_info: Introduction) -> None:
            if init_info.kind == "collective":
                self._group = join(
                    host=init_info.host,
                    port=init_info.port,
                    size=init_info.size,
                    rank=1 + self.parallel_config.rank,
                    backend=init_info.backend,
                    seconds=init_info.seconds,
                )

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Update) -> None:
            weights = self._fetch(update_info)
            self.checksum = digits(weights)
            self.shapes = {name: tuple(value.shape) for name, value in weights.items()}
            dtype = self.model_config.dtype
            self.readings = {
                name: digits({name: sampled(value, update_info.version, dtype)})
                for name, value in weights.items()
            }
            self.model.load_weights(iter(weights.items()))
            self.version = update_info.version

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_tied_heads(self.model)
            repack_experts(self.model)
            # Layers that were complete only now have read it.
            self._memory = None

        def shutdown(self) -> None:
            self._group = None
            self._memory = None

        def _fetch(self, update: Update) -> dict[str, Tensor]:
            layout = MemoryLayout.from_json(update.table)
            if update.kind == "shared":
                self._memory = map_shared(update.path)
            elif update.kind == "cuda":
                self._memory = _opened(update.handle, self.device)
            elif update.kind == "collective":
                if self._group is None:
                    raise RuntimeError("weights were announced before this worker was introduced")
                self._memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
                self._group.broadcast(torch.split(self._memory, PIECE_BYTES))
            elif update.kind == "file":
                return dict(read_file(update.path))
            else:
                raise ValueError(f"transfer kind {update.kind!r} is unknown to this worker")
            return layout.views(self._memory)

    return UniRLTransfer


def map_shared(path: str) -> Tensor:
    """The sender's memory, mapped: as long as a view of it lives."""
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _opened(handle: list[Any], device: torch.device) -> Tensor:
    import base64

    _, *rest = (base64.b64decode(one) if isinstance(one, str) else one for one in handle)
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(device.index or 0, *rest)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def read_file(path: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dictionary)
            yield name, file.get_tensor(name)


def _enter() -> type:
    """Make this process a worker of UniRL's: once, before it loads a model."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _backend())
        watch_owner()
        # All is shut down by then, and the interpreter's last garbage collection may take ten
        # seconds, or hang.
        atexit.register(os._exit, 0)
    return _Extension


def __getattr__(name: str) -> type:
    # vLLM asks for the extension in every worker before a model is loaded. Only then is vllm
    # imported, so that this module can be imported anywhere, and without effects.
    if name == "Extension":
        return _enter()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
