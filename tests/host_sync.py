"""Counts how often code reads a tensor on the host: on CUDA each of them waits for the device."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

READS = {
    "tolist", "item", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
    "nonzero", "masked_select", "is_nonzero", "equal", "allclose", "unique",
}  # fmt: skip


class CountHostReads(TorchFunctionMode):
    """`with CountHostReads() as reads: ...; reads.names` lists them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
