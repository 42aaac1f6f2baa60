"""Counts how often code reads a tensor on the host: on a device each of them waits for it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

READS = {
    "tolist", "item", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
    "nonzero", "masked_select", "is_nonzero", "equal", "allclose", "unique",
}  # fmt: skip
"""Functions of torch whose result the host has to know."""


@contextmanager
def host_reads(device: torch.device) -> Iterator[list[str]]:
    """Gather where tensors are read on the host while the context lasts; complete at its end.

    On CUDA torch tells (set_sync_debug_mode); it does not know of explicit waits, such as
    torch.cuda.synchronize(). On the CPU nothing waits: the calls that would wait are counted.
    """
    if device.type == "cuda":
        with _told_by_cuda() as places:
            yield places
    else:
        with CountHostReads() as reads:
            yield reads.places


class CountHostReads(TorchFunctionMode):
    """`with CountHostReads() as reads: ...; reads.names` lists the calls in order, `reads.places`
    where they were made. Sees calls of this thread only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        name = getattr(func, "__name__", "")
        masked = name == "__getitem__" and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else args[1:])
        )
        if name in READS or masked:
            self.names.append(name)
            self.places.append(_caller())
        return func(*args, **(kwargs or {}))


@contextmanager
def _told_by_cuda() -> Iterator[list[str]]:
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
            places += [
                _place(one.filename, one.lineno)
                for one in told
                if "synchronizing CUDA operation" in str(one.message)
            ]


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's."""
    own = (os.path.dirname(torch.__file__), __file__)
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return _place(frame.f_code.co_filename, frame.f_lineno)


def _place(path: str, line: int) -> str:
    return f"{os.path.join(*path.split(os.sep)[-2:])}:{line}"
