"""Which device a setting names."""

from __future__ import annotations

import torch

from unirl.device import usable_device
from unirl.host import local_rank


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
    rank = local_rank()
    # A process that sees one device alone has it as number 0.
    return "cuda" if rank is None or rank >= torch.cuda.device_count() else f"cuda:{rank}"
