"""Devices as settings name them; source: none."""

from __future__ import annotations

import re

import torch

from unirl.core.errors import UniRLError


def check_device(setting: str, device: str) -> None:
    """Raise UniRLError unless this is the name of a device, whether it is there or not."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UniRLError(f"{setting} {device!r} is unknown", "known: cpu, cuda, cuda:N", "try cpu")


def usable_device(setting: str, device: str) -> torch.device:
    """The device; UniRLError where it is not there."""
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UniRLError(
            f"{setting} is {device!r}",
            "this machine has no usable CUDA device",
            f"set {setting} to cpu",
        )
    return found
