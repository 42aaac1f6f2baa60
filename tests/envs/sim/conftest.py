"""A guard that fails where a step would wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.masked_select"}
"""Operators whose result has to be known on the host: .item(), bool(), nonzero."""
INDEXING = {"aten.index", "aten.index_put", "aten.index_put_"}
"""The same, where an index is a mask: x[mask]."""


class NoHostSync(TorchDispatchMode):
    """Raises at the first operator that waits for the device or copies between devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        masked = name in INDEXING and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)
            for x in tree_leaves(args[1])
        )
        if name in WAITING or masked:
            raise AssertionError(f"{name} waits for the device")
        result = func(*args, **(kwargs or {}))
        leaves = [*tree_leaves(args), *tree_leaves(kwargs or {}), *tree_leaves(result)]
        devices = {x.device for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0}
        if len(devices) > 1:
            raise AssertionError(f"{name} copies between {sorted(map(str, devices))}")
        return result


@pytest.fixture
def no_host_sync() -> Callable[[], AbstractContextManager[Any]]:
    """`with no_host_sync():` fails on .item(), bool(tensor), nonzero and copies between devices."""
    return NoHostSync
