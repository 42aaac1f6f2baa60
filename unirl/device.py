"""Devices as settings name them."""

from __future__ import annotations

import re

import torch

from unirl.errors import UniRLError


def check_device(setting: str, device: str, *, may_be_auto: bool = False) -> None:
    """Raise UniRLError unless this is the name of a device, whether it is there or not."""
    if may_be_auto and device == "auto":
        return
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        known = "auto, cpu, cuda, cuda:N" if may_be_auto else "cpu, cuda, cuda:N"
        raise UniRLError(f"{setting} {device!r} is unknown", f"known: {known}", "try cpu")


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
