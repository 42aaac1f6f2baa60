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
    """Gather the lines of code that read tensors on the host while the context lasts; complete at
    its end.

    On CUDA torch warns of them (set_sync_debug_mode); it does not know of explicit waits, such as
    torch.cuda.synchronize(). On the CPU nothing waits: the calls that would wait are counted.
    """
    if device.type == "cuda":
        with _cuda_warnings() as lines:
            yield lines
    else:
        with CountHostReads() as reads:
            yield reads.lines


class CountHostReads(TorchFunctionMode):
    """`with CountHostReads() as reads: ...; reads.names` lists the calls in order, `reads.lines`
    the lines of code that made them. Sees calls of this thread only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        masked = name == "__getitem__" and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else args[1:])
        )
        if name in READS or masked:
            self.names.append(name)
            self.lines.append(_caller())
        return func(*args, **(kwargs or {}))


@contextmanager
def _cuda_warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode(before)
            lines += [
                _line(one.filename, one.lineno)
                for one in caught
                if "synchronizing CUDA operation" in str(one.message)
            ]


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's."""
    skipped = (os.path.dirname(torch.__file__), __file__)
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return _line(frame.f_code.co_filename, frame.f_lineno)


def _line(path: str, number: int) -> str:
    return f"{os.path.join(*path.split(os.sep)[-2:])}:{number}"
