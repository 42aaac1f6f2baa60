"""Where a model runs, of what a setting says; source: none."""

from __future__ import annotations

import torch

from unirl.core.errors import UniRLError


def device_of(name: str, setting: str) -> str:
    """The device that `setting` names; auto: cuda where there is one, else cpu.

    Raises UniRLError for a CUDA device where there is none.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    if torch.device(name).type == "cuda" and not available:
        raise UniRLError(
            f"{setting} is {name!r}",
            "this machine has no usable CUDA device",
            f"set {setting} to auto or cpu",
        )
    return name
