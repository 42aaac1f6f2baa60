"""Memory that several processes map, and where tensors are in it."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import torch

from unirl.errors import UniRLError
from unirl.host import available_memory

_SMALL_BYTES = 2**26
"""What is available is an estimate: so little is just reserved."""
ALIGN = 64
"""A cache line; enough for every dtype and for aligned vector loads."""


def require_memory(num_bytes: int, what: str) -> None:
    """UniRLError where so much cannot be had: reserving it would end processes one by one."""
    available, whose = available_memory()
    if 0 < available < num_bytes and num_bytes > _SMALL_BYTES:
        raise UniRLError(
            f"{what} need {num_bytes / 2**30:,.1f} GiB of memory",
            f"{whose} has {available / 2**30:,.1f} GiB left",
            "use fewer slots (queue.batch_size, queue.max_staleness), fewer environments or shorter"
            " unrolls",
        )


class SharedBlock:
    """Anonymous zeroed memory that child processes can map."""

    def __init__(self, num_bytes: int, name: str) -> None:
        require_memory(num_bytes, name)
        self.fd = _anonymous_file(name)
        try:
            os.ftruncate(self.fd, num_bytes)
            # Reserved now: memory that does not exist must fail here, not as a bus error in the
            # middle of training.
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(self.fd, 0, num_bytes)
        except OSError as error:
            os.close(self.fd)
            raise UniRLError(
                f"cannot reserve {num_bytes / 2**20:.0f} MiB of shared memory for {name}",
                error.strerror or str(error),
                "use fewer slots (queue.batch_size, queue.max_staleness) or shorter unrolls",
            ) from error
        self._attach(num_bytes)

    def _attach(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(self.fd, num_bytes)
        weakref.finalize(self, os.close, self.fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": DupFd(self.fd), "num_bytes": self.num_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fd = state["fd"].detach()
        self._attach(state["num_bytes"])

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the block's bytes from `offset` on."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(
            tuple(shape)
        )


class SharedCells:
    def __init__(self, number: int, name: str) -> None:
        self._block = SharedBlock(8 * number, name)

    def view(self) -> memoryview:
        """The cells."""
        return memoryview(self._block.buffer).cast("q")


class LocalCells:
    """See unirl.core.transport.Cells. Of one process."""

    def __init__(self, number: int) -> None:
        self._bytes = bytearray(8 * number)

    def view(self) -> memoryview:
        """The cells."""
        return memoryview(self._bytes).cast("q")


def aligned_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Aligned offsets for items of these sizes in bytes, and the aligned total."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // ALIGN) * ALIGN
    return offsets, end


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return fd
