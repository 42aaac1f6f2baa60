"""Where a model runs, of what a setting says; source: none."""

from __future__ import annotations

import torch

from unirl.core.device import usable_device


def device_of(name: str, setting: str) -> str:
    """The device that `setting` names; auto: cuda where there is one, else cpu.

    Raises UniRLError for a CUDA device that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(usable_device(setting, name))
