"""Which device a setting names."""

from __future__ import annotations

import os

import torch

from unirl.core.device import usable_device


def device_of(name: str, setting: str) -> str:
    """The device that `setting` names; auto: cuda where there is one, else cpu. Under torchrun cuda
    is the one of this process' own rank: engines, reward models and learner of all processes would
    otherwise meet on the first.

    Raises UniRLError for a CUDA device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return str(usable_device(setting, name))
    usable_device(setting, name)
    rank = os.environ.get("LOCAL_RANK", "")
    # A process that sees one device alone has it as number 0.
    has_own = rank.isdecimal() and int(rank) < torch.cuda.device_count()
    return f"cuda:{rank}" if has_own else "cuda"
