"""How weights get from this process to an inference engine's workers: the sender's side. What
travels over the engine's own channel is JSON; the payload never does.
"""

from __future__ import annotations

import base64
import mmap
import os
import socket
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.models.checksum import checksum
from unirl.llm.weights.group import BroadcastGroup, join, listen
from unirl.llm.weights.layout import Layout
from unirl.llm.weights.own_folder import OwnFolder

MASTER = "127.0.0.1"
"""Where a collective's members meet, unless UNIRL_MASTER_ADDR names another address."""


class Sender(Protocol):
    """One way to send. `connect` runs beside the workers' answer to `introduction`, `push` beside
    their answer to what `write` returned; both may block, and run in a thread.
    """

    def introduction(self) -> dict[str, Any]:
        """What the workers must know once, before the first update."""

    def connect(self) -> None:
        """Meet the workers."""

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        """Put the weights where the workers find them; what they must know to do so, and
        "checksum": of all bits that arrive.
        """

    def push(self) -> None:
        """Send what `write` laid down, to workers that receive rather than fetch."""

    def close(self) -> None:
        """Let go of memory, files and connections; idempotent."""


class SharedMemorySender:
    """Written once into an anonymous piece of shared memory that every worker of this machine and
    user maps. It goes with this process, whatever ends it.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def introduction(self) -> dict[str, Any]:
        """See Sender."""
        return {"kind": "shared"}

    def connect(self) -> None:
        """See Sender."""

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        """See Sender."""
        layout = Layout.of(weights, dtype)
        if self._memory.numel() != layout.num_bytes:
            self.close()
            self._fd = os.memfd_create("unirl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, layout.num_bytes)
            self._map = mmap.mmap(self._fd, layout.num_bytes)
            self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        layout.write(weights, self._memory)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        told = {"kind": "shared", "path": path, "table": layout.as_json()}
        return told | {"checksum": _digits(layout.views(self._memory))}

    def push(self) -> None:
        """See Sender."""

    def close(self) -> None:
        """See Sender."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._map = None  # unmapped when the last view of it is gone
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CudaIpcSender:
    """Learner and engine on one GPU: the workers open the very memory the weights were packed
    into. Written by CUDA's documentation; needs a GPU to be tried.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None

    def introduction(self) -> dict[str, Any]:
        """See Sender."""
        return {"kind": "cuda"}

    def connect(self) -> None:
        """See Sender."""

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        """See Sender."""
        layout = Layout.of(weights, dtype)
        if self._memory is None or self._memory.numel() != layout.num_bytes:
            self._memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
        layout.write(weights, self._memory)
        # The workers read from streams of their own: the copies must have ended.
        torch.cuda.synchronize(self._device)
        storage: Any = self._memory.untyped_storage()
        handle = storage._share_cuda_()
        coded = [
            base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in handle
        ]
        told = {"kind": "cuda", "handle": coded, "table": layout.as_json()}
        return told | {"checksum": _digits(layout.views(self._memory))}

    def push(self) -> None:
        """See Sender."""

    def close(self) -> None:
        """See Sender."""
        self._memory = None


class CollectiveSender:
    """A process group of this process and all workers, wherever they are: NCCL between GPUs, else
    gloo. This process is rank 0 and broadcasts.
    """

    def __init__(self, num_workers: int, device: torch.device, seconds: float) -> None:
        self._size, self._device, self._seconds = 1 + num_workers, device, seconds
        self._host = os.environ.get("UNIRL_MASTER_ADDR", MASTER)
        self._listener: socket.socket | None = None
        self._group: BroadcastGroup | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def introduction(self) -> dict[str, Any]:
        """See Sender. The port is taken from here on: nobody can come in between."""
        if self._listener is None:
            self._listener = listen(self._host)
        return {
            "kind": "collective",
            "host": self._host,
            "port": self._listener.getsockname()[1],
            "size": self._size,
            "backend": "nccl" if self._device.type == "cuda" else "gloo",
            "seconds": self._seconds,
        }

    def connect(self) -> None:
        """See Sender."""
        told = {name: value for name, value in self.introduction().items() if name != "kind"}
        listener, self._listener = self._listener, None
        self._group = join(rank=0, listener=listener, **told)

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        """See Sender."""
        layout = Layout.of(weights, dtype)
        if self._memory.numel() != layout.num_bytes:
            self._memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
        layout.write(weights, self._memory)
        told = {"kind": "collective", "table": layout.as_json()}
        return told | {"checksum": _digits(layout.views(self._memory))}

    def push(self) -> None:
        """See Sender."""
        assert self._group is not None, "connect comes first"
        self._group.broadcast(self._memory)

    def close(self) -> None:
        """See Sender."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._group = None
        self._memory = torch.empty(0, dtype=torch.uint8)


class FileSender:
    """A safetensors file in a folder that both sides can read: for engines that share nothing else
    with this process. The last file is removed when the next one is written.

    folder: see OwnFolder; what a sender that was killed left there is removed.
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = OwnFolder("weights", folder)
        self._written = 0
        self._last: Path | None = None

    def introduction(self) -> dict[str, Any]:
        """See Sender."""
        return {"kind": "file"}

    def connect(self) -> None:
        """See Sender."""

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        """See Sender."""
        save_file = import_safetensors().torch.save_file
        self._written += 1
        path = self._folder.path() / f"weights-{self._written}.safetensors"
        part = path.with_suffix(".part")
        flat = {
            name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
            for name, value in weights.items()
        }
        save_file(flat, str(part))
        part.replace(path)
        if self._last is not None:
            self._last.unlink(missing_ok=True)
        self._last = path
        return {"kind": "file", "path": str(path), "checksum": _digits(flat)}

    def push(self) -> None:
        """See Sender."""

    def close(self) -> None:
        """See Sender."""
        self._folder.remove()
        self._last = None


def import_safetensors() -> Any:
    """The package, or a UniRLError that says how to get it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UniRLError(
            "weights go through a file, and safetensors is not installed",
            "engine.transfer file and lora write safetensors files",
            "pip install 'unirl[llm]'",
        ) from error
    return safetensors


def _digits(weights: Weights) -> str:
    """The checksum of all that is sent: JSON has no integers of 64 bits."""
    return f"{checksum(weights):016x}"
