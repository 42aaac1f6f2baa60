"""Devices as settings name them and as tensors do, and waiting for one with a deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import torch

from unirl.errors import UniRLError

PIECE_BYTES = 64 * 2**20
"""What copies of weights may need besides their source and their target, in bytes."""


def check_device(setting: str, device: str, *, may_be_auto: bool = False) -> None:
    """Raise UniRLError unless this is the name of a device, whether it is there or not."""
    if may_be_auto and device == "auto":
        return
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        known = "auto, cpu, cuda, cuda:N" if may_be_auto else "cpu, cuda, cuda:N"
        raise UniRLError(f"{setting} {device!r} is unknown", f"known: {known}", "try cpu")


def device_name(setting: str) -> str:
    """What a setting names, whether it is there or not; auto: cuda where there is one, else cpu."""
    if setting != "auto":
        return setting
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(setting: str, device: str) -> torch.device:
    """The device; UniRLError where it is not there."""
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise UniRLError(
            f"{setting} is {device!r}",
            "this machine has no usable CUDA device",
            f"set {setting} to cpu",
        )
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise UniRLError(
            f"{setting} is {device!r}",
            f"devices are counted from 0, and there are {count}",
            f"set {setting} to cuda:{count - 1} or less",
        )
    return found


def with_index(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is the one that is current, by its number."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def device_of_rank(device: str, rank: int | None) -> str:
    """What "cuda" means in this process of several on a machine: a device of its own, as long as it
    sees so many; one that sees a single device has it as number 0. Other names, and a process that
    is alone (None), stay as they are.
    """
    if device != "cuda" or rank is None or rank >= torch.cuda.device_count():
        return device
    return f"cuda:{rank}"


def finish_on_host(work: Any, seconds: float) -> None:
    """Wait until a collective of GPUs is done. NCCL's own wait lets a stream wait, for ever where
    another process is gone: no deadline reaches what a stream waits for.

    Raises RuntimeError when it failed, or the deadline passed; nothing on this process' streams
    waits for it then.
    """
    started = time.monotonic()
    while not work.is_completed():
        waited = time.monotonic() - started
        if waited > seconds:
            raise RuntimeError(f"no answer of all others within {seconds:g} s")
        time.sleep(0.0 if waited < 0.01 else 0.001)
    work.wait()


def gpu_of(device: torch.device) -> str:
    """What names a GPU among those of all machines; "" for any other device."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


@torch.no_grad()
def copy_weights(targets: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors by name, to the dtype and device of their targets. Weights may be made when they
    are asked for: no more of them are at a time than PIECE_BYTES, or one tensor.
    """
    into: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for name, target in targets.items():
        source = weights[name]
        if source.is_cuda and source.dtype != target.dtype and target.nbytes > PIECE_BYTES:
            # Torch would first convert all of it on the GPU, the largest tensor of a model.
            _copy_in_pieces(target, source)
            continue
        into.append(target)
        found.append(source)
        if sum(each.nbytes for each in into) >= PIECE_BYTES:
            torch._foreach_copy_(into, found)
            into, found = [], []
    if into:
        torch._foreach_copy_(into, found)


def _copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    if not (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source)
        return
    size = PIECE_BYTES // max(target.itemsize, source.itemsize)
    pieces = (torch.split(each.view(-1), size) for each in (target, source))
    for one, other in zip(*pieces, strict=True):
        one.copy_(other)
