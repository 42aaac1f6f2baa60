"""How weights get from this process to an inference engine's workers: the sender's side. What
travels over the engine's own channel is JSON; the payload never does.
"""

from __future__ import annotations

import base64
import mmap
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unirl.core.weights import Weights
from unirl.device import PIECE_BYTES
from unirl.llm.models.checksum import digits
from unirl.llm.packages import needs
from unirl.llm.weights.group import BroadcastGroup, join, listen
from unirl.llm.weights.layout import MemoryLayout
from unirl.llm.weights.own_folder import OwnFolder
from unirl.storage.disk import replacing

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
        """Send what `write` stored, to workers that receive rather than fetch."""

    def close(self) -> None:
        """Release memory, files and connections; idempotent."""


class SharedMemorySender:
    """Written once into an anonymous piece of shared memory that every worker of this machine and
    user maps. It ends with this process, whatever ends it.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._memory = _no_memory()

    def introduction(self) -> dict[str, Any]:
        return {"kind": "shared"}

    def connect(self) -> None:
        """Workers find the memory by its path."""

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        self._memory, info = _pack(weights, dtype, self._memory, self._allocate)
        return info | {"kind": "shared", "path": f"/proc/{os.getpid()}/fd/{self._fd}"}

    def push(self) -> None:
        """Workers map the memory."""

    def close(self) -> None:
        self._memory = _no_memory()  # unmapped when the last view of it is gone
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _allocate(self, num_bytes: int) -> Tensor:
        self.close()
        self._fd = os.memfd_create("unirl-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes)
        return torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)


class CudaIpcSender:
    """Learner and engine on one GPU: the workers open the very memory the weights were packed
    into. For models of at most MOST_BYTES: it is one more copy of the model on that GPU. Written by
    CUDA's documentation; needs a GPU to be tried.
    """

    MOST_BYTES = 2 * 2**30

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = _no_memory()

    def introduction(self) -> dict[str, Any]:
        return {"kind": "cuda"}

    def connect(self) -> None:
        """Workers find the memory by its handle."""

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        self._memory, info = _pack(weights, dtype, self._memory, _allocator(self._device))
        # The workers read from streams of their own: the copies must have ended.
        torch.cuda.synchronize(self._device)
        storage: Any = self._memory.untyped_storage()
        handle = [
            base64.b64encode(one).decode() if isinstance(one, bytes) else one
            for one in storage._share_cuda_()
        ]
        return info | {"kind": "cuda", "handle": handle}

    def push(self) -> None:
        """Workers open the memory."""

    def close(self) -> None:
        self._memory = _no_memory()


class CollectiveSender:
    """A process group of this process and all workers, wherever they are: NCCL between GPUs, else
    gloo. This process is rank 0 and broadcasts.
    """

    def __init__(self, num_workers: int, device: torch.device, seconds: float) -> None:
        self._size, self._device, self._seconds = 1 + num_workers, device, seconds
        self._host = os.environ.get("UNIRL_MASTER_ADDR", MASTER)
        self._listener: socket.socket | None = None
        self._group: BroadcastGroup | None = None
        self._next: tuple[MemoryLayout, Weights] | None = None

    def introduction(self) -> dict[str, Any]:
        """The port is in use from here on: no other process can take it in between."""
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
        settings = self.introduction()
        del settings["kind"]
        listener, self._listener = self._listener, None
        self._group = join(rank=0, listener=listener, **settings)

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        layout = MemoryLayout.of(weights, dtype)
        self._next = layout, weights
        table = {"table": layout.as_json(), "checksum": digits(weights, dtype)}
        return table | {"kind": "collective"}

    def push(self) -> None:
        assert self._group is not None and self._next is not None, "connect and write come first"
        (layout, weights), self._next = self._next, None
        self._group.broadcast(layout.pieces(weights, _allocator(self._device)(PIECE_BYTES)))

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._group = self._next = None


class FileSender:
    """A safetensors file in a folder that both sides can read: for engines that share nothing else
    with this process. The last file is removed when the next one is written.

    folder: see OwnFolder; what a sender that was killed left there is removed.
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = OwnFolder("weights", folder)
        self._written = 0

    def introduction(self) -> dict[str, Any]:
        return {"kind": "file"}

    def connect(self) -> None:
        """Workers find the file by its path."""

    def write(self, weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
        self._written += 1
        path = self._folder.path() / f"weights-{self._written}.safetensors"
        flat = {
            name: value.to("cpu", dtype if value.is_floating_point() else value.dtype)
            for name, value in weights.items()
        }
        with replacing(path) as aside:
            save_tensors(flat, aside)
        self._folder.keep_only(path)
        return {"kind": "file", "path": str(path), "checksum": digits(flat)}

    def push(self) -> None:
        """Workers read the file."""

    def close(self) -> None:
        self._folder.remove()


def save_tensors(tensors: Mapping[str, Tensor], path: Path, **about: str) -> None:
    """Write a safetensors file, and what there is to say about it."""
    with needs("safetensors", "no weights can go through a file"):
        from safetensors.torch import save_file
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, about or None)


def _pack(
    weights: Weights, dtype: torch.dtype, memory: Tensor, allocate: Callable[[int], Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """The weights in this memory, or in new memory where another size is needed; and how to read
    it.
    """
    layout = MemoryLayout.of(weights, dtype)
    if memory.numel() != layout.num_bytes:
        memory = allocate(layout.num_bytes)
    layout.write(weights, memory)
    return memory, {"table": layout.as_json(), "checksum": digits(layout.views(memory))}


def _allocator(device: torch.device) -> Callable[[int], Tensor]:
    return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _no_memory() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
